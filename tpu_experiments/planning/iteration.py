"""What an iteration of a run on its own answers costs: the answers, their rewards and scores, and what is learnt."""

from dataclasses import dataclass

from tpu_experiments.config.hardware import PriceConfig
from tpu_experiments.planning.decoding import Decoding
from tpu_experiments.planning.money import HOUR, Dollars, chip_hour


@dataclass(frozen=True)
class Iteration:
    """One rollout and the optimizer steps on its rows, in seconds; evaluations and checkpoints are not in it."""

    prompts: int
    samples: int
    """Answers to each prompt."""
    updates: int
    """Optimizer steps."""
    copy_seconds: float
    """In which the copy of the weights is made that answers are written with."""
    prefill_seconds: float
    decode_seconds: float
    reward_seconds: float
    """As given (task.reward_seconds): the chips wait for it."""
    score_seconds: float
    """In which rows are scored before the first step, by the current model or that of the start; 0 without need."""
    update_seconds: float
    """Of all steps."""
    num_devices: int

    @property
    def parts(self) -> dict[str, float]:
        """Return the seconds by part, in the order of time."""
        return {
            "copy of the weights": self.copy_seconds,
            "prefill": self.prefill_seconds,
            "decoding": self.decode_seconds,
            "rewards": self.reward_seconds,
            "scoring": self.score_seconds,
            "updates": self.update_seconds,
        }

    @property
    def seconds(self) -> float:
        """Return the sum of the parts."""
        return sum(self.parts.values())

    @property
    def rollout_seconds(self) -> float:
        """Return the seconds before the first step."""
        return self.seconds - self.update_seconds

    @property
    def answers_per_second(self) -> float:
        """Return the answers that are written and learnt from in a second."""
        return self.prompts * self.samples / self.seconds

    def usd_per_thousand(self, price: PriceConfig | None) -> Dollars:
        """Return the dollars of a thousand iterations on all chips."""
        return chip_hour(price).times(1000 * self.seconds * self.num_devices / HOUR)

    def usd_per_thousand_answers(self, price: PriceConfig | None) -> Dollars:
        """Return the dollars of a thousand answers that are written and learnt from."""
        return self.usd_per_thousand(price).times(1 / (self.prompts * self.samples))


def iteration_of(
    decoding: Decoding,
    *,
    prompts: int,
    samples: int,
    updates: int,
    reward_seconds: float,
    score_seconds: float,
    step_seconds: float,
) -> Iteration | None:
    """Return an iteration whose answers are planned; None where they do not fit."""
    if decoding.prefill_seconds is None or decoding.decode_seconds is None:
        return None
    return Iteration(
        prompts=prompts,
        samples=samples,
        updates=updates,
        copy_seconds=decoding.merge_seconds,
        prefill_seconds=decoding.prefill_seconds,
        decode_seconds=decoding.decode_seconds,
        reward_seconds=reward_seconds,
        score_seconds=score_seconds,
        update_seconds=updates * step_seconds,
        num_devices=decoding.num_devices,
    )
