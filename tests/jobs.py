"""The job that most tests run, by its words: the tiny model on the shipped text, then on the shipped conversations."""

from collections.abc import Sequence

TINY_JOB = ("model=tiny", "data=[sample_text,sample_chat]")


def of_tiny_job(overrides: Sequence[str]) -> list[str]:
    """The overrides over those of the tiny job; a recipe's alone, which has a model and data of its own."""
    return [*overrides] if any(word.startswith("experiment=") for word in overrides) else [*TINY_JOB, *overrides]
