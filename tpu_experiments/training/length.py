"""Another length for a run that has begun: where every step that it keeps is a step of the longer run as well."""

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
    """What a run of another length goes on from."""

    step: int
    """Of its checkpoint; 0 where it has none."""
    num_steps: int
    """That it has now, over all stages."""
    why: str | None = None
    """What the steps behind that checkpoint would have otherwise; None where there are none."""


@dataclass(frozen=True)
class _Agreement:
    """How far two lengths of a run are the same steps."""

    num_steps: int
    """From the first one on."""
    why: str | None = None
    """What is different behind them; None where one of the two ends there."""
    is_decay: bool = False
    """Whether that is the decay which a run of this schedule ends with, so that it has a point from before it."""


def new_length(folder: RunFolder, inputs: RunInputs, config: Config) -> NewLength | None:
    """Where a run whose length changed goes on; None where it did not change.

    Raises:
        ConfigError: the steps that are done depend on the length, and there is no checkpoint from before that.
    """
    stored = folder.stored_identity()
    if stored is None or not is_of_other_length(stored, config):
        return None
    checkpoints = folder.path("checkpoints")
    now = [num_steps_of(inputs, stage, config=config) for stage in inputs.stages]
    found = latest_progress(checkpoints)
    if found is None:
        return NewLength(0, sum(now))
    before = _as_it_was(config, stored)
    was = [num_steps_of(inputs, stage, config=before) for stage in resolve_stages(before)]
    if any(new < old for new, old in zip(now, was, strict=True)):
        raise _refusal(folder, config, stored, why=f"{sum(was)} steps, and {sum(now)} are fewer in one of its stages")
    agreed = _agreement(inputs, config, before=before)
    if found[0] > agreed.num_steps:
        found = latest_progress(checkpoints, before=agreed.num_steps + 1) if agreed.is_decay else None
    if found is None:
        assert agreed.why is not None, "a run has no checkpoint behind its last step"
        why = f"{agreed.why}, and no checkpoint from before is kept" if agreed.is_decay else agreed.why
        raise _refusal(folder, config, stored, why=why)
    progress = progress_of(found[1], folder=checkpoints)
    last = progress.stages[-1] if progress.stages else None
    if last is not None and progress.stage == len(progress.stages) and (last.ended_by or last.restored_step):
        why = last.ended_by or f"it ended with step {last.restored_step}, its best"
        raise _refusal(folder, config, stored, why=f"stage {last.name} did not end with its last step: {why}")
    return NewLength(found[0], sum(now), agreed.why)


def lengthen(folder: RunFolder, config: Config, length: NewLength) -> None:
    """Have the run folder be that of the new length; killed anywhere, the same command does the rest.

    The result of the shorter run is kept as `result_of_step_<its last>.json`, its export until there is another.
    """
    log.info(
        "name=%s has %d steps now; it goes on from its checkpoint of step %d%s",
        folder.name,
        length.num_steps,
        length.step,
        f" ({length.why})" if length.why else "",
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
    """Optimizer steps of a stage, if it does not end before."""
    return stage_steps(stage_rows(inputs, stage, config=config), stage, inputs=inputs, config=config)


def _as_it_was(config: Config, stored: Mapping[str, Any]) -> Config:
    """The config with the values that the run folder was made with."""
    before = copy.deepcopy(config)
    for key in changes(stored, config):
        node: Any = before
        *groups, name = _path(key, config)
        for group in groups:
            node = node[group] if isinstance(node, dict) else getattr(node, group)
        setattr(node, name, stored.get(key))
    return before


def _path(key: str, config: Config) -> list[str]:
    """The parts of a dotted key; names of stages and sources may have dots too."""
    for group, names in (("curriculum.stages", config.curriculum.stages), ("data", config.data)):
        for name in sorted(names, key=len, reverse=True):
            prefix = f"{group}.{name}."
            if key.startswith(prefix):
                return [*group.split("."), name, *key.removeprefix(prefix).split(".")]
    return key.split(".")


def _agreement(inputs: RunInputs, config: Config, *, before: Config) -> _Agreement:
    done = 0
    for old, new in zip(resolve_stages(before), inputs.stages, strict=True):
        rows = stage_rows(inputs, new, config=config)
        then = stage_steps(rows, old, inputs=inputs, config=before)
        now = stage_steps(rows, new, inputs=inputs, config=config)
        for step in range(then):
            why = _difference(rows, old, new, step=step, then=then, now=now)
            if why is not None:
                is_decay = new is inputs.stages[-1] and old.schedule.name == "wsd"
                return _Agreement(done + step, f"stage {new.name}, step {step + 1} of it: {why}", is_decay)
        done += then
        if then != now:
            return _Agreement(done, f"the stage after {new.name} has begun")
    return _Agreement(done)


def _difference(rows: ReplayedRows, old: Stage, new: Stage, *, step: int, then: int, now: int) -> str | None:
    """What a step of a stage would have had otherwise; None where it is the same step."""
    was = multiplier(old.schedule, step=step, num_steps=then)
    would = multiplier(new.schedule, step=step, num_steps=now)
    if was != would:
        return (
            f"its learning rate was {was * old.lr:.4g} in {then} steps and would be {would * new.lr:.4g} in {now} "
            f"(schedule {new.schedule.name})"
        )
    taken = (step + 1) * new.geometry.global_rows
    taken -= rows.num_replayed(taken)
    ends = [math.inf if stage.epochs is None else rows.total_for(stage.epochs) for stage in (old, new)]
    if ends[0] != ends[1] and taken > min(ends):
        return "its batch was filled up with padding at the end of the epochs, and would have rows of the next one"
    return None


def _refusal(folder: RunFolder, config: Config, stored: Mapping[str, Any], *, why: str) -> ConfigError:
    shown = "; ".join(f"{key}={stored.get(key)!r}, now {value!r}" for key, value in changes(stored, config).items())
    return ConfigError(
        f"name={config.name}; {folder.path()} was made with {shown}; what it has done is no part of a run of that "
        f"length ({why}); restore the values, or train on from it under another name: start.run={folder.path()}."
    )
