"""Settings of rollouts: the answers that a model writes to prompts, and the rewards that it learns from."""

from dataclasses import dataclass, field

from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.places import place
from tpu_experiments.config.reward_schema import RewardConfig


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
