"""Look at the files and folders of this machine that a command names, before torch is loaded or the Hub is asked."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tpu_experiments.config.data_schema import DataSourceConfig
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import ModelConfig
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import (
    AnswerTaskConfig,
    EvaluateTaskConfig,
    GenerateTaskConfig,
    PrepareTaskConfig,
    TokenizerTaskConfig,
    WeightsConfig,
)
from tpu_experiments.data.documents import spec_of
from tpu_experiments.data.reading.locations import require_present
from tpu_experiments.storage import given_folders, paths
from tpu_experiments.storage.run_folder import RunFolder

SHIPPED = ("tpu_experiments/samples/", "outputs/stories/")
"""Folders of the shipped data, and of what samples/stories.py writes."""
STORIES = "tpu_experiments/samples/stories/"
"""Folder of the story reader, which is trained where no model is chosen."""
TRAINING = ("train", "resume_check")
READING = (*TRAINING, "prepare", "tokenizer")
"""Tasks that read the sources of `data=`."""


def require_given(config: Config) -> None:
    """Refuse local files and folders that are not there, or are not what their keys ask for.

    Raises:
        ConfigError: with a line for each.
    """
    problems: list[str] = []

    @contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            problems.append(str(error))

    task = config.task
    if isinstance(task, EvaluateTaskConfig | WeightsConfig):
        with noted():
            _require_weights(config, task)
    if isinstance(task, GenerateTaskConfig) and task.prompts_file is not None:
        with noted():
            given_folders.require_file(
                task.prompts_file, key="task.prompts_file", what="a .txt or .jsonl file in UTF-8"
            )
    selects_data = isinstance(task, EvaluateTaskConfig) and (task.data == "selected" or _needs_no_run(task))
    for name in config.data if task.name in READING or selects_data else ():
        with noted():
            _require_source(config, name)
    if task.name in (*TRAINING, "prepare", "certify"):
        with noted():
            _require_model(config.model, is_read=task.name != "prepare")
    if task.name in TRAINING:
        for key, file in config.questions.values():
            with noted():
                given_folders.require_file(file, key=key, what="a .jsonl file of conversations")
    if task.name in TRAINING and config.start.run is not None and not _has_checkpoints(config):
        with noted():
            given_folders.require_start(config.start.run)
    if isinstance(task, TokenizerTaskConfig) and task.compare_with is not None:
        with noted():
            given_folders.require_tokenizer_folder(task.compare_with, key="task.compare_with")
    if isinstance(task, PrepareTaskConfig) and task.teacher is not None and not task.predicts:
        with noted():
            given_folders.require_answers(task.teacher)
    problems += _of_teachers(config)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def _of_teachers(config: Config) -> list[str]:
    """Return a line for each source without the teacher that the objective learns from, or with a file as one."""
    task = config.task
    asked = isinstance(task, PrepareTaskConfig) and (task.teacher or task.teacher_requests)
    if not config.objective.teacher_entries() or not (task.name in TRAINING or asked):
        return []
    found = []
    for name, source in config.data.items():
        key, folder = f"data.{name}.teacher", source.teacher
        if folder is None:
            found.append(
                f"{key}=null with objective={config.objective.name}; it learns from a teacher's predictions of every "
                f"source; name their folder with {key}=FOLDER, and write them by task=prepare task.teacher=RUN."
            )
        elif not paths.is_remote(folder) and Path(paths.absolute(folder)).is_file():
            found.append(f"{key}={folder}; it is a file; name a folder, a new one or that of a task=prepare.")
    return found


def foreign_data(config: Config) -> str | None:
    """Return a sentence where the shipped story reader is to learn from other data than its stories; None elsewhere."""
    model = config.model
    if not model.path.startswith(STORIES) or model.size != "full" or model.init == "random":
        return None
    others = [name for name, source in config.data.items() if not source.path.startswith(SHIPPED)]
    if not others:
        return None
    return (
        f"model={model.name} has a million parameters and has read short Romanian stories alone, and "
        f"data=[{','.join(others)}] is something else: choose a model for it, for example model=qwen05b, or "
        "debug=smoke to try the command"
    )


def run_to_evaluate(config: Config, task: EvaluateTaskConfig) -> RunFolder:
    """Return the folder of the run that task=evaluate names, or of the command's own.

    Raises:
        ConfigError: it does not exist.
    """
    folder = RunFolder.of(config) if task.run is None else RunFolder.at(task.run)
    if folder.exists():
        return folder
    key = f"name={config.name}" if task.run is None else f"task.run={task.run}"
    raise ConfigError(
        f"{key}; {folder.path()} is no run folder; train first, or name a run's folder with task.run=, an adapter's "
        "with task.adapter=, or evaluate the base model alone with task.adapter=none."
    )


def _needs_no_run(task: EvaluateTaskConfig) -> bool:
    return task.adapter is not None and task.run is None


def _require_weights(config: Config, task: EvaluateTaskConfig | WeightsConfig) -> None:
    """Refuse a run, adapter, base or GGUF file that is not there."""
    if isinstance(task, EvaluateTaskConfig):
        if not _needs_no_run(task) and not paths.is_remote(task.run or config.output_dir):
            run_to_evaluate(config, task)
        if task.adapter not in (None, "none"):
            given_folders.require_adapter(task.adapter, key="task.adapter")
        if _needs_no_run(task):
            _require_model(config.model)
        return
    if task.run is not None:
        weights = "base" if task.adapter is not None else task.weights
        given_folders.require_run(task.run, weights=weights)
    if task.adapter is not None:
        given_folders.require_adapter(task.adapter, key="task.adapter")
    if task.base is not None:
        given_folders.require_checkpoint(task.base, key="task.base")
    if isinstance(task, AnswerTaskConfig) and task.gguf is not None:
        given_folders.require_file(task.gguf, key="task.gguf", what="a .gguf file")
    elif task.run is None and task.base is None and config.task.name != "export":
        _require_model(config.model)


def _require_model(model: ModelConfig, *, is_read: bool = True) -> None:
    """Refuse a checkpoint, tokenizer or chat template that is not there.

    Args:
        is_read: whether the checkpoint's weights are; of it the tokenizer is read in any case, unless it has its own.
    """
    is_own = model._target_ == ModelConfig._target_
    if is_own and is_read and model.size == "full" and model.init == "pretrained":
        given_folders.require_checkpoint(model.path)
    if model.tokenizer_path is not None:
        given_folders.require_tokenizer_folder(model.tokenizer_path)
    if model.chat_template_path is not None:
        given_folders.require_template(model.chat_template_path)


def _require_source(config: Config, name: str) -> None:
    """Refuse a local file, folder or pattern of a source that is not there; a reader of the user's own knows better."""
    source = config.data[name]
    if source._target_ != DataSourceConfig._target_:
        return
    spec = spec_of(name, source, data_size=config.data_size, is_labelled=config.objective.reads_labels)
    require_present(spec)
    for key in ("eval_path", "test_path"):
        path = getattr(spec, key)
        if path is not None:
            require_present(replace(spec, path=str(paths.find_local(path) or path), path_key=key))


def _has_checkpoints(config: Config) -> bool:
    folder = RunFolder.of(config)
    return paths.is_remote(folder.path()) or paths.exists(folder.path("checkpoints"))
