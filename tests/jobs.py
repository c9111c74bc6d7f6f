"""The job that most tests run, by its words: the tiny model on the shipped text, then on the shipped conversations."""

import re
from collections.abc import Sequence

TINY_JOB = ("model=tiny", "data=[sample_text,sample_chat]")
SHORT_ROWS = "model.row_tokens=128"
"""Of the tiny model in tests, where short rows are quick."""
IS_OVERRIDE = re.compile(r"[^-].*=|~")


def of_tiny_job(overrides: Sequence[str]) -> list[str]:
    """The overrides over those of the tiny job, behind Hydra's flags; a recipe has a model and data of its own."""
    if any(word.startswith("experiment=") for word in overrides):
        return [*overrides]
    first = next((at for at, word in enumerate(overrides) if IS_OVERRIDE.match(word)), len(overrides))
    rows = [] if any(word.startswith("model=") for word in overrides) else [SHORT_ROWS]
    return [*overrides[:first], *TINY_JOB, *rows, *overrides[first:]]
