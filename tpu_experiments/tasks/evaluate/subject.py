"""Choose what is evaluated: a run's export or newest checkpoint, an adapter, or the base alone."""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tpu_experiments.checkpoint.proof import read_model
from tpu_experiments.checkpoint.state import newest_parameters, progress_of
from tpu_experiments.checkpoint.store import latest_progress
from tpu_experiments.config.checks import check
from tpu_experiments.config.commands import override_of, typed
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import DATA_KEYS, MODEL_KEYS, ONLY_OPEN, config_of_run, identity
from tpu_experiments.config.model_schema import held_as_given
from tpu_experiments.config.objectives import EVALUATED, FIRST, OBJECTIVES
from tpu_experiments.config.objectives.base import ObjectiveConfig
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import EvaluateTaskConfig
from tpu_experiments.export.reading import read_adapter, require_rounded_alike
from tpu_experiments.models.sources.build import STARTS
from tpu_experiments.objectives.base import writes_text
from tpu_experiments.runtime.processes.env import compile_cache_root
from tpu_experiments.storage import paths
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.training.given import run_to_evaluate
from tpu_experiments.training.start import StartPoint

log = logging.getLogger(__name__)
BASE_ALONE = "none"


@dataclass(frozen=True)
class Subject:
    """Model to evaluate, next to its base."""

    config: Config
    """Config of its run, if it has one, with the hardware of this command."""
    kind: str
    """`adapter`, `model`, `checkpoint` or `base`."""
    place: str
    """Folder of its tensors; for a checkpoint, the folder of all checkpoints."""
    results: str
    """File to write the results to."""
    start: StartPoint | None = None
    """What the run started from, where its loss compares with that; None for the base."""
    audit: Mapping[str, str] | None = None
    """Audit hash of the training data by `<source>@<row length>`; None where unknown."""

    def tensors(self) -> Mapping[str, Tensor] | None:
        """Return the trained tensors under Hugging Face's names; None for the base."""
        if self.kind == "base":
            return None
        if self.kind == "adapter":
            tensors = read_adapter(self.place, has_head=True).tensors
            return _for_reduced_base(tensors) if self.config.lora.init == "pissa" else tensors
        max_held_bytes = self.config.checkpoint.max_copy_gib * 2**30
        if self.kind == "model":
            return read_model(self.place, max_held_bytes=max_held_bytes)
        found = newest_parameters(self.place, max_held_bytes=max_held_bytes)
        assert found is not None, "`subject_of` has seen one"
        return found[1]


def task_of(config: Config) -> EvaluateTaskConfig:
    """Return the settings of task=evaluate."""
    assert isinstance(config.task, EvaluateTaskConfig)
    return config.task


def subject_of(config: Config) -> Subject:
    """Return what this command evaluates.

    Raises:
        ConfigError: the run or adapter does not exist, has nothing to evaluate, or belongs to another config.
    """
    task = task_of(config)
    chosen = f"-{'-'.join(config.data)}" if task.data == "selected" else ""
    file = f"{task.split}_results{chosen}.json"
    if task.adapter is not None and task.run is None:
        results = paths.join(config.output_dir, "evaluations", str(config.name), file)
        return _with_adapter(Subject(config, "base", "", results), task.adapter)
    folder = run_to_evaluate(config, task)
    found = _config_of(folder, config, task)
    held = replace(found, model=held_as_given(found.model, given=config.model))
    if held != found:
        check(held)
        file = file.replace(".json", f"-{held.model.base}.json")
    subject = run_subject(held, folder, file=file)
    return subject if task.adapter is None else _with_adapter(subject, task.adapter)


def _config_of(folder: RunFolder, config: Config, task: EvaluateTaskConfig) -> Config:
    """Return the run's own config, with the hardware of this command.

    Raises:
        ConfigError: the run was found by this command's name, and its config differs.
    """
    keys = (*MODEL_KEYS, "objective", *(() if task.data == "selected" else DATA_KEYS))
    found = config_of_run(config, text=config_text(folder), place=folder.config_path, keys=keys)
    objective = _objective_of_data(found)
    if task.data == "selected":
        objective = objective.on_data_of(config.objective)
    found = dataclasses.replace(found, objective=objective)
    if task.run is None:
        then, now = ({k: v for k, v in identity(c).items() if k.startswith(keys)} for c in (found, config))
        changed = [
            f"{key}={then.get(key)!r}, now {now.get(key)!r}"
            for key in then | now
            if then.get(key) != now.get(key) and not ONLY_OPEN.fullmatch(key)
        ]
        if changed:
            raise ConfigError(
                f"name={config.name}; {folder.path()} was made with {'; '.join(changed[:8])}; restore the values, or "
                f"take the run's own with {typed(override_of('task.run', folder.path()))}."
            )
    _require_scored(folder)
    # Row geometry is this command's, and so is the compile cache, since compiled programs are machine code.
    own = replace(config.trainer, seq_len=found.trainer.seq_len, options=found.trainer.options)
    hw = replace(config.hw, compile_cache=compile_cache_root(config) or "none")
    return dataclasses.replace(found, trainer=own, hw=hw, output_dir=folder.output_dir, name=folder.name)


def _objective_of_data(config: Config) -> ObjectiveConfig:
    """Return the run's objective, or that of texts where it compares pairs and the command selects texts.

    Raises:
        ConfigError: the data is pairs and the objective does not compare them, or is both pairs and texts.
    """
    name, kinds = config.objective.name, {source: each.kind for source, each in config.data.items()}
    are_pairs = {kind == "preference" for kind in kinds.values()}
    if are_pairs == {config.objective.reads_pairs}:
        return config.objective
    if are_pairs == {False} and not writes_text(config):
        raise ConfigError(
            f"data=[{','.join(kinds)}] with the run's objective={name}; these documents are no pairs, and its model "
            "gives scores and no text; select pairs of answers."
        )
    if are_pairs == {False}:
        log.info("objective=%s; these documents are no pairs: they are scored as texts", name)
        return of_texts()
    told = ", ".join(f"data.{source}.kind={kind}" for source, kind in kinds.items())
    raise ConfigError(
        f"{told}, with the run's objective={name}; "
        + (
            "pairs and texts are scored apart; select one of them."
            if config.objective.reads_pairs
            else "it does not compare the answers of pairs; select texts, or evaluate a run of preferences."
        )
    )


def of_texts() -> ObjectiveConfig:
    """Return the objective of texts: next tokens."""
    return next(kind(key) for key, kind in OBJECTIVES.items() if kind._target_ == FIRST)


def _require_scored(folder: RunFolder) -> None:
    """Require a run to have an objective whose documents are scored.

    Raises:
        ConfigError: it has another objective.
    """
    target = (folder.stored_identity() or {}).get("objective._target_", FIRST)
    if target not in EVALUATED:
        raise ConfigError(
            f"{folder.path()}; its objective is {target}, and task=evaluate scores next, masked or replaced tokens, "
            "labels and preferred answers; the run's own held-out losses are in its metrics.jsonl and result.json."
        )


def config_text(folder: RunFolder) -> str:
    """Return the text of the run's config.yaml.

    Raises:
        ConfigError: it is missing, or not text.
    """
    try:
        return paths.read_text(folder.config_path)
    except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError) as error:
        raise ConfigError(f"{folder.config_path}; it cannot be read ({type(error).__name__}); restore it.") from error


def run_subject(
    config: Config,
    folder: RunFolder,
    *,
    file: str,
    instead: str = "evaluate the base model alone with task.adapter=none",
) -> Subject:
    """Return the run's export, or its newest checkpoint if it is not finished; `instead` ends a refusal.

    Raises:
        ConfigError: it has neither.
    """
    results = folder.path(file)
    finished = folder.finished()
    if finished is not None:
        kind = "model" if config.lora.r == 0 else "adapter"
        start = _start_of(finished.get("start"), config, run=folder.path())
        found = Subject(config, kind, folder.path(kind), results, start, finished.get("data_audit"))
        if kind == "model" or (config.lora.init in STARTS and config.objective.reads_reference()):
            return found  # the model as the run began is made again, of its own settings
        return _with_adapter(found, found.place)
    newest = latest_progress(folder.path("checkpoints"))
    if newest is None:
        raise ConfigError(
            f"{folder.path()}; the run is not finished and has no checkpoint; let it train until its first one, or "
            f"{instead}."
        )
    step, progress = newest
    log.warning("%s is not finished; its checkpoint of step %d is evaluated", folder.path(), step)
    checkpoints = folder.path("checkpoints")
    then = progress_of(progress, folder=checkpoints)
    start = _start_of(then.start, config, run=folder.path())
    return Subject(config, "checkpoint", checkpoints, results, start, then.data)


def _start_of(lineage: Mapping[str, Any] | None, config: Config, *, run: str) -> StartPoint | None:
    """Return what a run started from, if its loss compares with that.

    Raises:
        ConfigError: it was moved or deleted.
    """
    if lineage is None or not config.objective.reads_reference():
        return None
    point = StartPoint(**lineage)
    if not paths.exists(point.place):
        raise ConfigError(
            f"{run}; it is compared with the model that it started from, {point.place}, which is not there; restore "
            "that folder."
        )
    return point


def _for_reduced_base(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return A and B for the base that PiSSA reduced: of the exported B A - B0 A0 the first r of 2 r."""
    found = dict(tensors)
    found |= {name: each[: len(each) // 2] for name, each in tensors.items() if name.endswith("lora_A")}
    halves = {name: each[:, : each.shape[1] // 2] for name, each in tensors.items() if name.endswith("lora_B")}
    return found | {name: half.contiguous() for name, half in halves.items()}


def _with_adapter(subject: Subject, adapter: str) -> Subject:
    """Return the subject with the adapter of a folder, or with the base alone."""
    if adapter == BASE_ALONE:
        return replace(subject, kind="base", place="")
    found = read_adapter(adapter, has_head=True)
    require_rounded_alike(found, subject.config.model, key=f"task.adapter={adapter}")
    config = replace(subject.config, lora=found.carried)
    return replace(subject, kind="adapter", place=adapter, config=config)
