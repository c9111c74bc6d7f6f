"""Prune points early by the median rule over intermediate held-out losses.

After Optuna's MedianPruner (optuna/pruners/_median.py, _percentile.py; Akiba et al., arXiv 1907.10902): a point is
stopped at a step where its best intermediate value so far is worse than the median of the others' values at that step.
Optuna counts finished trials only; here, pruned and running points count too, up to their last evaluation, so that
points that run side by side can be compared.
"""

import json
import statistics
from collections.abc import Mapping, Sequence

from tpu_experiments.config.schema import Config, SweepingConfig
from tpu_experiments.storage import paths
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.storage.strict_json import RECORD, shaped

Losses = Mapping[int, float]
"""Held-out loss by step."""


def step_to_prune_at(own: Losses, others: Sequence[Losses], settings: SweepingConfig) -> int | None:
    """Return the first step at which the rule stops a point, or None.

    Args:
        own: the point's evaluations so far.
        others: those of every other point, empty where it has none.
    """
    for step in sorted(own):
        if step <= settings.prune_after_steps:
            continue
        there = [losses[step] for losses in others if step in losses]
        best = min(loss for at, loss in own.items() if at <= step)
        if len(there) >= settings.prune_after_points and best > statistics.median(there):
            return step
    return None


class Evaluations:
    """Held-out losses of a run, read from its metrics.jsonl."""

    def __init__(self, folder: RunFolder) -> None:
        self._file = folder.path("metrics.jsonl")
        self.losses: dict[int, float] = {}
        self.last_step = 0
        self.last_train_loss: float | None = None

    def refresh(self) -> None:
        """Read the file again, skipping records that are incomplete or null.

        It is read from the start, since a run resumed from a checkpoint truncates it first.
        """
        try:
            text = paths.read_text(self._file)
        except FileNotFoundError:
            return
        self.losses = {}
        for line in text.split("\n")[:-1]:
            try:
                record = shaped(json.loads(line), RECORD) or {}
            except (ValueError, RecursionError):
                continue
            if record.get("step", 0) > 0 and isinstance(record.get("eval/loss"), float):
                self.losses[record["step"]] = record["eval/loss"]
            if "step" in record and isinstance(record.get("train/loss"), float):
                self.last_step, self.last_train_loss = record["step"], record["train/loss"]


def no_pruning_reason(config: Config) -> str | None:
    """Return a warning where `sweeping.prune` can have no effect, else None."""
    if config.sweeping.prune == "none" or config.task.name != "train":
        return None
    if config.trainer.eval_every_steps == 0:
        return (
            "sweeping.prune=median stops nothing: trainer.eval_every_steps=0 evaluates at the end alone; set it to a "
            "number of steps."
        )
    if not any(logger._target_.endswith("JsonlLogger") for logger in config.logger.values()):
        return "sweeping.prune=median stops nothing: no logger writes metrics.jsonl; add jsonl to `logger`."
    return None
