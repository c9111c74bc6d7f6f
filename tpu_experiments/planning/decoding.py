"""What writing answers costs on a machine: reading prompts, a token after the other, memory. Formats nothing."""

from dataclasses import dataclass

from tpu_experiments.config.hardware import PriceConfig
from tpu_experiments.planning.money import HOUR, Dollars, chip_hour


@dataclass(frozen=True)
class Decoding:
    """Answers of one length to a batch of prompts of one length."""

    rows: int
    """Answers that are written at once, over all chips: `task.decode.rows`, rounded up to the chips."""
    prompt_tokens: int
    new_tokens: int
    """Tokens of each answer."""
    computed_tokens: int
    """Tokens of each answer after its first, rounded up to whole calls of the program."""
    prefill_seconds: float | None
    """Seconds in which all prompts are read and each answer's first token is written; null where it does not fit."""
    token_seconds: float | None
    """Seconds in which each answer gets one more token; null where that does not fit."""
    floor_seconds: float
    """Seconds in which a chip reads its weights and its cache once from HBM: no token takes less."""
    classes: dict[str, float]
    """GiB per chip of both programs, of which each holds the largest."""
    total_gib: float
    """GiB per chip during the larger program."""
    beside_gib: float
    """The same, and what training keeps on the chip: its weights and optimizer state."""
    limit_gib: float
    num_devices: int
    compile_seconds: float
    merge_seconds: float = 0.0
    """Seconds in which a run makes the copy of its weights that all these answers are written with."""

    @property
    def fits(self) -> bool:
        """Whether both programs fit beside what training keeps."""
        return self.token_seconds is not None and self.prefill_seconds is not None and self.beside_gib <= self.limit_gib

    @property
    def decode_seconds(self) -> float | None:
        """Seconds in which the answers are written after their first token."""
        return None if self.token_seconds is None else self.token_seconds * self.computed_tokens

    @property
    def seconds(self) -> float | None:
        """Seconds from a run's weights and the prompts to the ends of all answers."""
        if self.prefill_seconds is None or self.decode_seconds is None:
            return None
        return self.merge_seconds + self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all answers while they are written, prompts not counted."""
        return None if self.token_seconds is None else self.rows / self.token_seconds

    @property
    def share_of_floor(self) -> float | None:
        """Floor over the time of a token, 0 to 1."""
        return None if self.token_seconds is None else self.floor_seconds / self.token_seconds

    def usd_per_million_tokens(self, price: PriceConfig | None) -> Dollars:
        """Return dollars per million tokens of answers, the reading of their prompts included."""
        if self.seconds is None:
            return Dollars(None, None)
        hours = self.seconds * self.num_devices / HOUR
        return chip_hour(price).times(1e6 * hours / (self.rows * self.new_tokens))
