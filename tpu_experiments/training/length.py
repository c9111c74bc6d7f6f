"""Changing the length of a run that has begun.

A run may continue with more steps if its completed steps are identical in the longer run: same learning rates and same
batches. Otherwise it continues from an earlier checkpoint (wsd schedule only), or is refused.
"""

import copy
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpu_experiments.checkpoint.manifest import folder_name
from tpu_experiments.checkpoint.state import progress_of
from tpu_experiments.checkpoint.store import latest_progress, remove_after
from tpu_experiments.config.curriculum import Stage, resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import changes, is_of_other_length
from tpu_experiments.config.schema import Config
from tpu_experiments.data.replay import ReplayedRows
from tpu_experiments.optim.schedules import multiplier
from tpu_experiments.storage import paths
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.training.batches import RunInputs, stage_rows, stage_steps

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NewLength:
    """Starting point of a run whose length changed."""

    step: int
    """Step of the checkpoint that the run continues from; 0 if it has none."""
    num_steps: int
    """New number of steps, over all stages."""
    reason: str | None = None
    """How the steps after that checkpoint would differ in the longer run; None if there are none or none differ."""


@dataclass(frozen=True)
class _CommonPrefix:
    """Common prefix of the shorter and the longer run."""

    num_steps: int
    """Number of leading steps that are identical in both."""
    reason: str | None = None
    """Difference at the next step; None if the shorter run ends there."""
    is_decay: bool = False
    """Whether the difference is in the last stage and its schedule is wsd, so a checkpoint from before the final decay
    can be continued."""


def new_length(folder: RunFolder, inputs: RunInputs, config: Config) -> NewLength | None:
    """Return where a run whose length changed continues, or None if its length did not change.

    Raises:
        ConfigError: a stage became shorter; completed steps would differ in the longer run and no checkpoint from
            before them is kept; or the run or its last stage ended early, or that with its best evaluation.
    """
    stored = folder.stored_identity()
    if stored is None or not is_of_other_length(stored, config):
        return None
    checkpoints = folder.path("checkpoints")
    new_steps = [num_steps_of(inputs, stage, config=config) for stage in inputs.stages]
    found = latest_progress(checkpoints)
    if found is None:
        return NewLength(0, sum(new_steps))
    before = _with_stored_values(config, stored)
    was = [num_steps_of(inputs, stage, config=before) for stage in resolve_stages(before)]
    if any(new < old for new, old in zip(new_steps, was, strict=True)):
        raise _refusal(
            folder, config, stored, reason=f"{sum(was)} steps, and {sum(new_steps)} are fewer in one of its stages"
        )
    prefix = _common_prefix(inputs, config, before=before)
    if found[0] > prefix.num_steps:
        found = latest_progress(checkpoints, before=prefix.num_steps + 1) if prefix.is_decay else None
    if found is None:
        assert prefix.reason is not None, "a run has no checkpoint behind its last step"
        reason = f"{prefix.reason}, and no checkpoint from before is kept" if prefix.is_decay else prefix.reason
        raise _refusal(folder, config, stored, reason=reason)
    progress = progress_of(found[1], folder=checkpoints)
    last = progress.stages[-1] if progress.stages else None
    if last is not None and progress.stage == len(progress.stages) and (last.ended_by or last.restored_step):
        reason = last.ended_by or f"it ended with step {last.restored_step}, its best"
        raise _refusal(folder, config, stored, reason=f"stage {last.name} did not end with its last step: {reason}")
    if last is not None and progress.ended_by and (last.ended_by or len(progress.stages) < len(new_steps)):
        reason = (
            f"the run was ended in stage {last.name}, {len(progress.stages)} of {len(new_steps)}: {progress.ended_by}"
        )
        raise _refusal(folder, config, stored, reason=reason)
    return NewLength(found[0], sum(new_steps), prefix.reason)


def lengthen(folder: RunFolder, config: Config, length: NewLength) -> None:
    """Convert the run folder to the new length.

    If killed midway, the same command completes it. Moves the shorter run's result to `result_of_step_<its last>.json`
    and removes checkpoints after `length.step`. The shorter run's export remains until the next one replaces it.
    """
    log.info(
        "name=%s has %d steps now; it resumes from its checkpoint of step %d%s",
        folder.name,
        length.num_steps,
        length.step,
        f" ({length.reason})" if length.reason else "",
    )
    result = folder.finished()
    if result is not None:
        steps = sum(int(stage["steps"]) for stage in result["stages"])
        kept = folder.path(f"result_of_{folder_name(steps)}.json")
        paths.write_bytes_atomic(kept, paths.read_bytes(folder.result_path))
        paths.remove_tree(folder.result_path)
    remove_after(folder.path("checkpoints"), length.step)
    folder.write_identity(config)


def num_steps_of(inputs: RunInputs, stage: Stage, *, config: Config) -> int:
    """Return the optimizer steps of a stage that no exit test ends early."""
    return stage_steps(stage_rows(inputs, stage, config=config), stage, inputs=inputs, config=config)


def _with_stored_values(config: Config, stored: Mapping[str, Any]) -> Config:
    """Return a copy of the config with the values stored in the run folder's identity."""
    before = copy.deepcopy(config)
    for key in changes(stored, config):
        node: Any = before
        *groups, name = _path(key, config)
        for group in groups:
            node = node[group] if isinstance(node, dict) else getattr(node, group)
        setattr(node, name, stored.get(key))
    return before


def _path(key: str, config: Config) -> list[str]:
    """Split a dotted key into its parts; names of stages and sources may contain dots."""
    for group, names in (("curriculum.stages", config.curriculum.stages), ("data", config.data)):
        for name in sorted(names, key=len, reverse=True):
            prefix = f"{group}.{name}."
            if key.startswith(prefix):
                return [*group.split("."), name, *key.removeprefix(prefix).split(".")]
    return key.split(".")


def _common_prefix(inputs: RunInputs, config: Config, *, before: Config) -> _CommonPrefix:
    done = 0
    for old, new in zip(resolve_stages(before), inputs.stages, strict=True):
        rows = stage_rows(inputs, new, config=config)
        old_steps = stage_steps(rows, old, inputs=inputs, config=before)
        new_steps = stage_steps(rows, new, inputs=inputs, config=config)
        for step in range(old_steps):
            reason = _difference(rows, old, new, step=step, old_steps=old_steps, new_steps=new_steps)
            if reason is not None:
                is_decay = new is inputs.stages[-1] and old.schedule.name == "wsd"
                return _CommonPrefix(done + step, f"stage {new.name}, step {step + 1} of it: {reason}", is_decay)
        done += old_steps
        if old_steps != new_steps:
            return _CommonPrefix(done, f"the stage after {new.name} has begun")
    return _CommonPrefix(done)


def _difference(rows: ReplayedRows, old: Stage, new: Stage, *, step: int, old_steps: int, new_steps: int) -> str | None:
    """Return how a step (from 0) of a stage differs between `old_steps` and `new_steps` steps in all, or None."""
    was = multiplier(old.schedule, step=step, num_steps=old_steps)
    would = multiplier(new.schedule, step=step, num_steps=new_steps)
    if was != would:
        return (
            f"its learning rate was {was * old.lr:.4g} in {old_steps} steps and would be {would * new.lr:.4g} in "
            f"{new_steps} (schedule {new.schedule.name})"
        )
    taken = (step + 1) * new.geometry.global_rows
    taken -= rows.num_replayed(taken)
    ends = [math.inf if stage.epochs is None else rows.total_for(stage.epochs) for stage in (old, new)]
    if ends[0] != ends[1] and taken > min(ends):
        return "its batch was filled up with padding at the end of the epochs, and would have rows of the next one"
    return None


def _refusal(folder: RunFolder, config: Config, stored: Mapping[str, Any], *, reason: str) -> ConfigError:
    shown = "; ".join(f"{key}={stored.get(key)!r}, now {value!r}" for key, value in changes(stored, config).items())
    return ConfigError(
        f"name={config.name}; {folder.path()} was made with {shown}; what it has done is no part of a run of that "
        f"length ({reason}); restore the values, or train on from it under another name: start.run={folder.path()}."
    )
