"""Find the weights to generate with: a model, and tensors of a run or adapter applied to it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from tpu_experiments.checkpoint.proof import read_model
from tpu_experiments.checkpoint.state import newest_parameters
from tpu_experiments.config.checks import check
from tpu_experiments.config.commands import command, override_of
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import require_own_places, values_of_run
from tpu_experiments.config.model_schema import HELD, LoraConfig, ModelConfig, held_as_given
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import AnswerTaskConfig, WeightsConfig
from tpu_experiments.export.card import MARKER
from tpu_experiments.export.peft import ADAPTER_CONFIG
from tpu_experiments.export.reading import read_adapter, require_rounded_alike
from tpu_experiments.objectives.base import writes_text
from tpu_experiments.storage import paths
from tpu_experiments.storage.given_folders import no_weights
from tpu_experiments.training.batches import tokenizer_location

log = logging.getLogger(__name__)
TAKEN = ("seed", "plugins", "model", "lora")
"""Parts taken from a run's config; of its data, only the kinds are read."""


@dataclass(frozen=True)
class Origin:
    """Everything that determines the function the model computes."""

    config: Config
    """Config with the model and the seed of the run."""
    kinds: frozenset[str] | None = None
    """Kinds of the sources that the run trained on, `text` and `chat`; None without a run."""
    lora: LoraConfig = field(default_factory=lambda: LoraConfig(r=0))
    trained: Mapping[str, Tensor] = field(default_factory=dict)
    reduced_with_seed: int | None = None
    text: str = "the weights"


def origin_of(config: Config, task: WeightsConfig, *, dtype: str | None = None) -> Origin:
    """Find config and weights; an adapter's tensors are read into memory.

    Args:
        dtype: `model.dtype` in the place of the run's.

    Raises:
        ConfigError: something is missing or does not match.
    """
    origin = Origin(config) if task.run is None else _run_origin(config, task.run)
    if task.run is not None and isinstance(task, AnswerTaskConfig):
        held = held_as_given(origin.config.model, given=config.model)
        origin = replace(origin, config=replace(origin.config, model=held))
        check(_checked(origin.config, weights=task.weights))
    origin = replace(origin, config=_with_overrides(origin.config, task, dtype=dtype))
    if task.adapter is not None:
        return _with_adapter(origin, task.adapter)
    if task.run is not None and task.weights == "merged":
        return _with_merged(origin, task.run, given=config.model)
    if isinstance(task, AnswerTaskConfig) and task.is_llama_cpp:
        return replace(origin, lora=LoraConfig(r=0))
    if task.run is None or task.weights == "base":
        return replace(origin, lora=LoraConfig(r=0), text=f"base of {origin.text}" if task.run else origin.text)
    return _with_weights(origin, task.run, task.weights)


def _checked(config: Config, *, weights: str) -> Config:
    """Return the config to check: of weights without adapters, none of LoRA's settings matters."""
    return replace(config, lora=LoraConfig(r=0)) if weights in ("base", "merged", "gguf") else config


def _run_origin(config: Config, folder: str) -> Origin:
    """Return the command's config with the run's model, adapter and seed."""
    place = paths.join(folder, "config.yaml")
    try:
        text = paths.read_text(place)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"task.run={folder}; there is no config.yaml there; name the folder of a run.") from error
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}; it is no text ({type(error).__name__}); restore it.") from error
    values = values_of_run(config, text=text, place=place, keys=(*TAKEN, "objective", "data"))
    kinds = frozenset(source.kind for source in values.pop("data").values())
    require_own_places(values, config, place=place)
    changed = replace(config, **values)
    check(changed)
    return Origin(changed, kinds=kinds, lora=changed.lora, text=f"run {folder}")


def _with_overrides(config: Config, task: WeightsConfig, *, dtype: str | None) -> Config:
    model = config.model
    if task.base is not None:
        own = tokenizer_location(config) if model.tokenizer_path or model.size == "tiny" else None
        model = replace(model, path=task.base, revision=None, init="pretrained", size="full", tokenizer_path=own)
    return replace(config, model=replace(model, dtype=dtype or model.dtype))


def _with_adapter(origin: Origin, folder: str, *, is_own: bool = False) -> Origin:
    """Return the model with an adapter, and warn if that names another base; not of one that its own run has drawn."""
    # A classifier's is read too, so that the task refuses it by its objective.
    found = read_adapter(folder, has_head=not writes_text(origin.config))
    require_rounded_alike(found, origin.config.model, key=f"task.adapter={folder}")
    model = origin.config.model
    path = model.path
    is_drawn = is_own and (model.init == "random" or model.size == "tiny")
    if not is_drawn and found.base.rstrip("/").rpartition("/")[2] != path.rstrip("/").rpartition("/")[2]:
        log.warning("%s names %s as its base, and the model is %s", folder, found.base or "nothing", path)
    return replace(origin, lora=found.whole, trained=found.tensors, text=f"adapter {folder}")


def form_of(run: str, form: str) -> str:
    """Return the folder of a form that task=export wrote for a run.

    Raises:
        ConfigError: there is none, or it is unfinished.
    """
    folder = paths.join(run, "export", form)
    if not paths.exists(paths.join(folder, MARKER)):
        raise ConfigError(
            f"task.weights={form}; {folder} has no {MARKER}, which task=export writes last; write it first: "
            f"`{command('task=export', override_of('task.run', run), override_of('task.forms', [form]))}`."
        )
    return folder


def _with_merged(origin: Origin, run: str, *, given: ModelConfig) -> Origin:
    """Return the merged model of a run: from a local folder as a model of its own, from a bucket by its tensors."""
    folder, model = form_of(run, "merged"), origin.config.model
    text = f"merged model {folder}"
    held: dict[str, Any] = {key: getattr(given, key) for key in HELD}
    if not paths.is_remote(folder):
        own = replace(
            model,
            path=folder,
            revision=None,
            init="pretrained",
            size="full",
            tokenizer_path=None,
            chat_template_path=None,
            chat_format="tokenizer",
            **held,
        )
        return replace(origin, config=replace(origin.config, model=own), lora=LoraConfig(r=0), text=text)
    whole = read_model(folder, max_held_bytes=origin.config.checkpoint.max_copy_gib * 2**30)
    config = replace(origin.config, model=replace(model, **held))
    return replace(origin, config=config, lora=LoraConfig(r=0), trained=whole, text=text)


def _with_weights(origin: Origin, folder: str, chosen: str) -> Origin:
    max_held_bytes = origin.config.checkpoint.max_copy_gib * 2**30
    adapter, model, checkpoints = (paths.join(folder, part) for part in ("adapter", "model", "checkpoints"))
    if chosen != "checkpoint" and paths.exists(paths.join(adapter, ADAPTER_CONFIG)):
        return _with_adapter(origin, adapter, is_own=True)
    if chosen != "checkpoint" and paths.exists(paths.join(model, "config.json")):
        whole = read_model(model, max_held_bytes=max_held_bytes)
        return replace(origin, lora=LoraConfig(r=0), trained=whole, text=f"model {model}")
    found = None if chosen == "export" else newest_parameters(checkpoints, max_held_bytes=max_held_bytes)
    if found is None:
        raise ConfigError(no_weights(folder, weights=chosen))
    step, tensors_of_step = found
    seed = origin.config.seed if origin.lora.init == "pissa" and origin.lora.r else None
    text = f"checkpoint of step {step} in {checkpoints}"
    return replace(origin, trained=tensors_of_step, reduced_with_seed=seed, text=text)
