"""Prompts of the selected conversations, for objectives whose answers the model writes itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.schema import Config


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenised for the model."""

    ids: list[int]
    """The conversation up to its last answer, rendered with what begins an answer."""
    text: str
    """Text of `ids`, as rewards see it."""
    row: dict[str, Any]
    """Fields of the row in its file, and `answer`, the last answer of the conversation, where there is none."""


@dataclass(frozen=True)
class Prompts:
    """Prompts of a run by split, in the order of their sources."""

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]


def read_prompts(
    config: Config,
    *,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str] | None = None,
    seq_len: int | None = None,
) -> Prompts:
    """Read the prompts of a run.

    Args:
        sources: names of sources, as those of a stage; None takes all.
        seq_len: tokens of a row; None takes `trainer.seq_len`, which is then set.

    Raises:
        ConfigError: a source cannot be read, or no prompt to train on fits into a row.
    """
    raise NotImplementedError
