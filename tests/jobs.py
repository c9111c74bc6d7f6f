"""The job that most tests run, by its words: the tiny model on the shipped text, then on the shipped conversations."""

import re
from collections.abc import Sequence
from importlib.util import find_spec

TINY_JOB = ("model=tiny", "data=[sample_text,sample_chat]")
SHORT_ROWS = "model.row_tokens=128"
"""Of the tiny model in tests, where short rows are quick."""
QUICK_COMPILES = "--xla_backend_optimization_level=0" + (
    " --xla_cpu_use_fusion_emitters=false" if find_spec("torch_xla") else ""
)
"""XLA_FLAGS of tests. LLVM's level: four test files took 121 s of CPU without it, 69 s with it.

Fusions emitted as LLVM IR rather than through MLIR: a run of `debug=smoke` takes 10.0 in the place of 11.4 s of CPU.
torch_xla 2.9.0 knows that flag; a library that does not know one ends the process.
"""
IS_OVERRIDE = re.compile(r"[^-].*=|~")


def of_tiny_job(overrides: Sequence[str]) -> list[str]:
    """The overrides over those of the tiny job, behind Hydra's flags; a recipe has a model and data of its own."""
    if any(word.startswith("experiment=") for word in overrides):
        return [*overrides]
    first = next((at for at, word in enumerate(overrides) if IS_OVERRIDE.match(word)), len(overrides))
    rows = [] if any(word.startswith("model=") for word in overrides) else [SHORT_ROWS]
    return [*overrides[:first], *TINY_JOB, *rows, *overrides[first:]]
