"""Compare the killed and resumed run with the uninterrupted one: rows, losses, rates and bytes."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from tpu_experiments.storage import paths
from tpu_experiments.tasks.resume_check.children import KILLED, WHOLE, Life

Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Check:
    """Comparison of one aspect, which must be equal."""

    name: str
    difference: str
    """First difference; empty if there is none."""
    compared: str
    """How much was compared."""


@dataclass(frozen=True)
class Verdict:
    """Results of all comparisons."""

    checks: list[Check]

    @property
    def is_equal(self) -> bool:
        """Return whether nothing differs."""
        return not any(check.difference for check in self.checks)


def compare(lives: list[Life], *, place: str) -> Verdict:
    """Run every check; the first life is the uninterrupted run."""
    uninterrupted, *killed = lives
    checks = [check_position(killed), check_rows(uninterrupted, killed)]
    records = {run: training_records(place, run) for run in (WHOLE, KILLED)}
    for name, key in (("losses", "train/loss"), ("learning rates", "train/lr"), ("gradient norms", "train/grad_norm")):
        checks.append(check_records(name, *(values(records[run], key) for run in (WHOLE, KILLED))))
    checks.append(check_once(records[KILLED]))
    results = [json.loads(paths.read_text(paths.join(place, run, "result.json"))) for run in (WHOLE, KILLED)]
    checks.append(check_results(*results))
    folders = [paths.join(place, run, "rollouts") for run in (WHOLE, KILLED)]
    if paths.list_names(folders[0]):
        checks.append(check_tensors("answers and their rewards", *folders))
    folders = [adapter_folder(place, run) for run in (WHOLE, KILLED)]
    checks.append(check_tensors("trained weights as exported", *folders))
    folders = [newest_checkpoint(place, run) for run in (WHOLE, KILLED)]
    checks.append(
        check_tensors("trained weights, last checkpoint", *folders, chosen=lambda name: "optimizer" not in name)
    )
    checks.append(check_tensors("optimizer state, last checkpoint", *folders, chosen=lambda name: "optimizer" in name))
    return Verdict(checks)


def check_position(killed: list[Life]) -> Check:
    """Compare each resume's first step with the newest checkpoint of the process before."""
    difference = ""
    for before, life in pairwise(killed):
        first = min(life.rows, default=0)
        if not difference and not before.checkpoint_after == life.resume_step == first - 1:
            difference = (
                f"the newest checkpoint was of step {before.checkpoint_after}, it went on from {life.resume_step} and "
                f"its first step was {first}"
            )
    return Check("resumes from the newest checkpoint", difference, f"{len(killed) - 1} resumes")


def check_rows(uninterrupted: Life, killed: list[Life]) -> Check:
    """Compare the rows and their order in every step, whichever process trained it."""
    seen = [(step, rows) for life in killed for step, rows in life.rows.items()]
    difference = ""
    for step, rows in seen:
        if not difference and rows != uninterrupted.rows.get(step):
            difference = (
                f"step {step} took {', '.join(rows[:4])}; uninterrupted it took {shown(uninterrupted.rows.get(step))}"
            )
    missing = sorted(uninterrupted.rows.keys() - {step for step, _ in seen})
    if not difference and missing:
        difference = f"step {missing[0]} was skipped"
    return Check("rows (source:row)", difference, f"{sum(len(rows) for _, rows in seen)} rows of {len(seen)} steps")


def check_records(name: str, uninterrupted: dict[int, float], killed: dict[int, float]) -> Check:
    """Compare values by step, bit for bit."""
    steps = sorted(uninterrupted.keys() | killed.keys())
    bad = [step for step in steps if uninterrupted.get(step) != killed.get(step)]
    difference = (
        f"step {bad[0]}: {uninterrupted.get(bad[0])} uninterrupted, {killed.get(bad[0])} resumed" if bad else ""
    )
    return Check(name, difference, f"{len(steps)} records")


def check_once(records: Records) -> Check:
    """Check that every step occurs once in the killed run's log."""
    twice = [item for item in Counter(record["step"] for record in records).items() if item[1] > 1]
    difference = f"step {twice[0][0]} occurs {twice[0][1]} times" if twice else ""
    return Check("one record a step", difference, f"{len(records)} records")


def check_results(uninterrupted: dict[str, Any], killed: dict[str, Any]) -> Check:
    """Compare the quality fields of result.json."""
    keys = ("eval_loss_before", "eval_loss", "tokens", "sample_before", "sample_after", "skill")
    bad = [key for key in keys if uninterrupted.get(key) != killed.get(key)]
    difference = f"{bad[0]}: {uninterrupted.get(bad[0])} uninterrupted, {killed.get(bad[0])} resumed" if bad else ""
    return Check("held-out loss, tokens, answers", difference, f"{len(keys)} values")


def check_tensors(
    name: str, uninterrupted: str, killed: str, *, chosen: Callable[[str], bool] = lambda name: True
) -> Check:
    """Compare all tensors, byte for byte, in the safetensors files accepted by `chosen` of two folders."""
    names = [
        [file for file in paths.list_names(folder) if file.endswith(".safetensors") and chosen(file)]
        for folder in (uninterrupted, killed)
    ]
    if not names[0] or names[0] != names[1]:
        return Check(name, f"files {shown(names[0])} uninterrupted, {shown(names[1])} resumed", "")
    num_bytes, difference = 0, ""
    for file in names[0]:
        ours, theirs = (load(paths.read_bytes(paths.join(folder, file))) for folder in (uninterrupted, killed))
        num_bytes += sum(t.nbytes for t in ours.values())
        bad = [key for key in sorted(ours.keys() | theirs.keys()) if not same_bytes(ours.get(key), theirs.get(key))]
        difference = difference or (f"{bad[0]} and {len(bad) - 1} more of {file}" if bad else "")
    return Check(name, difference, f"{num_bytes:,} bytes")


def same_bytes(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether shape, dtype and bits are equal (a NaN equals itself)."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def training_records(place: str, run: str) -> Records:
    """Return the training records of metrics.jsonl."""
    lines = paths.read_text(paths.join(place, run, "metrics.jsonl")).split("\n")
    return [record for line in lines if line and "train/loss" in (record := json.loads(line))]


def values(records: Records, key: str) -> dict[int, float]:
    """Return the values of a key by step."""
    return {record["step"]: record[key] for record in records}


def adapter_folder(place: str, run: str) -> str:
    """Return the folder of the export: the adapter, or the whole model."""
    names = paths.list_names(paths.join(place, run))
    return paths.join(place, run, "adapter" if "adapter" in names else "model")


def newest_checkpoint(place: str, run: str) -> str:
    """Return the folder of the newest checkpoint."""
    folder = paths.join(place, run, "checkpoints")
    return paths.join(folder, max(name for name in paths.list_names(folder) if name.startswith("step_")))


def shown(items: list[str] | None) -> str:
    """Format the first four items."""
    return ", ".join((items or ["none"])[:4])
