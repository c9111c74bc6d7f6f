"""Settings of rollouts: the answers that a model writes to prompts, and the rewards that it learns from."""

from dataclasses import dataclass, field

from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.places import place
from tpu_experiments.config.reward_schema import FUNCTIONS, RewardConfig
from tpu_experiments.config.targets import target_problems


@dataclass
class RolloutConfig:
    """Prompts and answers of an iteration; only an objective that samples its own rows reads this."""

    prompts: int = number(default=16, at_least=1, at_most=2**24)
    """Prompts of an iteration, drawn in an order of their own in every epoch."""
    samples: int = number(default=8, at_least=2, at_most=2**24)
    """Answers to each prompt; their rewards are compared with each other."""
    max_new_tokens: int = number(default=256, at_least=1, at_most=2**24)
    """Largest number of tokens of an answer, with its end mark; an answer that has none by then is cut off."""
    max_prompt_tokens: int | None = number(default=None, at_least=1, at_most=2**24)
    """Largest number of tokens of a prompt; longer ones are left out and counted. null: what `max_new_tokens` leaves of
    a row."""
    temperature: float = number(default=1.0, above=0)
    """Divisor of the logits before a token is drawn; held-out prompts are answered with the likeliest tokens."""
    updates: int = number(default=1, at_least=1)
    """Optimizer steps on the rows of an iteration, each on as many of them; a row is in one step."""
    masks_cut: bool = False
    """Whether answers that were cut off are not learnt; their rewards still count for the other answers."""
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    """Rewards by name; an answer has their sum, by weight."""
    reward_workers: int | None = number(default=None, at_least=1)
    """Processes that compute rewards; null is one for each core."""
    reward_memory_gib: float | None = number(default=2.0, above=0)
    """Memory of each, in GiB, beside what it has at the start, where the platform limits it (Linux); null: no limit."""
    sampler: str = choice("own", "openai", default="own")
    """What writes the answers: `own` programs on the devices of the training, or a server that speaks the protocol of
    OpenAI's completions with token ids (`openai`), as vLLM's does."""
    url: str | None = None
    """Address of the server, as http://localhost:8000."""
    model: str | None = None
    """Name that the server has for the base; null is `model.path`."""
    adapter_folder: str | None = place("folder", default=None)
    """Folder that adapters are written to for the server, which must see it under the same name; null is the run's."""
    max_lag: int = number(default=1, at_least=0)
    """Iterations that the parameters behind an answer of the server may be older than the current ones."""
    max_seconds: float = number(default=600.0, above=0)
    """Time on the clock for the answers of an iteration by the server."""

    @property
    def num_rows(self) -> int:
        """Return the answers of an iteration."""
        return self.prompts * self.samples

    @property
    def step_rows(self) -> int:
        """Return the rows of an optimizer step."""
        return self.num_rows // self.updates

    def prompt_tokens(self, seq_len: int) -> int:
        """Return the largest number of tokens of a prompt in rows of `seq_len` tokens."""
        room = seq_len - self.max_new_tokens
        return room if self.max_prompt_tokens is None else min(room, self.max_prompt_tokens)


def rollout_problems(rollout: RolloutConfig, *, objective: str) -> list[str]:
    """Return what is wrong with the settings by themselves, where answers are sampled for an objective."""
    key, problems = "rollout.rewards", []
    if not rollout.rewards:
        problems.append(
            f"{key}={{}} with objective={objective}; it learns from what answers are worth, and nothing says that; "
            f"choose reward={' or '.join(FUNCTIONS)} (several: 'reward=[number,length]'), or name a function of your "
            f"own: '+{key}={{mine: {{function: package.module.name}}}}'."
        )
    elif all(reward.weight == 0 for reward in rollout.rewards.values()):
        problems.append(f"{key}; all weights are 0, so that every answer is worth the same; give one another weight.")
    for name, reward in rollout.rewards.items():
        problems += target_problems(reward.full_name, key=f"{key}.{name}", setting="function")
    if rollout.num_rows % rollout.updates:
        problems.append(
            f"rollout.updates={rollout.updates} does not divide the {rollout.num_rows} answers of rollout.prompts="
            f"{rollout.prompts} x samples={rollout.samples}; use a divisor of {rollout.num_rows}."
        )
    problems += _server_problems(rollout)
    return problems


def _server_problems(rollout: RolloutConfig) -> list[str]:
    if rollout.sampler == "own":
        given = {name: getattr(rollout, name) for name in ("url", "model", "adapter_folder")}
        return [
            f"rollout.{name}={value} with rollout.sampler=own; no server is asked; leave it out, or use rollout=vllm."
            for name, value in given.items()
            if value is not None
        ]
    if rollout.url is None or not rollout.url.startswith(("http://", "https://")):
        return [
            f"rollout.url={'null' if rollout.url is None else rollout.url} with rollout.sampler={rollout.sampler}; it "
            "is no address of a server; write one as rollout.url=http://localhost:8000."
        ]
    return []
