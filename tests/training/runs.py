"""Whole runs of run.py in a process of their own, and what they left behind."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import forks
from tests.jobs import of_tiny_job

REPOSITORY = Path(__file__).parents[2]
# With several threads XLA's CPU matrix products sum in an order of their own: on a busy machine an ulp differs.
# The level is LLVM's: compiling three programs of two tiny layers takes 2.0 s at level 1 and 0.8 s at level 0.
SAME_SUMS = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0"}


SMALL = (
    "curriculum.stages.text.steps=60",
    "curriculum.stages.chat.steps=60",
    "trainer.seq_len=128",
    "trainer.global_batch_rows=8",
    "trainer.log_every_steps=10",
    "trainer.eval_every_steps=30",
    "trainer.max_eval_rows=16",
    "sample.max_new_tokens=8",
    "checkpoint.every_steps=100",
    "schedule.warmup_steps=5",
)
"""A job of known length, whatever the defaults make of the sample data; no recipe and no other curriculum has it."""
OWN_LENGTH = ("experiment=", "debug=", "curriculum=", "schedule=")


def sized(overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides over those of a small job of known length, where they are of no recipe."""
    return tuple(overrides) if any(word.startswith(OWN_LENGTH) for word in overrides) else (*SMALL, *overrides)


def run(
    *overrides: str, output_dir: Path, env: dict[str, str] | None = None, as_typed: bool = False
) -> "subprocess.CompletedProcess[str]":
    """Run the tiny job with these overrides, or a recipe, in the caller's environment less what the tests set in it.

    Args:
        as_typed: run what the overrides alone say.
    """
    words = overrides if as_typed else of_tiny_job(sized(overrides))
    kept = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "CPU_NUM_DEVICES")}
    return forks.run(["run.py", *words, f"output_dir={output_dir}"], env=kept | SAME_SUMS | (env or {}))


def finished(*overrides: str, output_dir: Path, as_typed: bool = False) -> dict[str, Any]:
    """Run to the end and return result.json; the output is shown when the run fails."""
    done = run(*overrides, output_dir=output_dir, as_typed=as_typed)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = output_dir.glob("*/result.json")
    loaded: dict[str, Any] = json.loads(result.read_text())
    return loaded


def records(output_dir: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl of the one run in `output_dir`."""
    (metrics,) = output_dir.glob("*/metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def losses(output_dir: Path) -> list[float]:
    """The logged training losses, in order."""
    return [record["train/loss"] for record in records(output_dir) if "train/loss" in record]
