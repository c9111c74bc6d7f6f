"""Settings of rewards: functions of an answer, each with a weight."""

from dataclasses import dataclass, field
from typing import Any

from tpu_experiments.config.fields import number

BUILT_IN = "tpu_experiments.rewards.functions"
FUNCTIONS = ("exact", "number", "regex", "length", "json_schema")
"""Rewards of that module."""


@dataclass
class RewardConfig:
    """A function `(prompt, completion, row, **arguments) -> float`, or one of TRL's form."""

    function: str
    """Name of one in rewards/functions.py, as `number`, or package.module.name of your own."""
    weight: float = 1.0
    """Factor of it in the sum of the rewards."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments by keyword."""
    max_seconds: float = number(default=5.0, above=0)
    """Time on the clock for one answer; one that takes longer has no reward."""
    gives_messages: bool = False
    """Whether a function of TRL's form, `(prompts, completions, **columns) -> list`, gets messages instead of texts, as
    TRL gives it of conversations."""

    @property
    def full_name(self) -> str:
        """Return package.module.name of the function."""
        return self.function if "." in self.function else f"{BUILT_IN}.{self.function}"
