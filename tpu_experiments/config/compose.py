"""Conversion of Hydra's result to a checked Config, and recomposition with further overrides.

`variant` composes the command's config again with further overrides, such as another machine or a search's settings.
"""

import dataclasses
import hashlib
import re
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tpu_experiments.config.checks import MAX_NAME_LENGTH, check
from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.config.fields import walk
from tpu_experiments.config.folders import CONF, has_tokenizer
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.messages import choices, is_own, sentence
from tpu_experiments.config.model_schema import ModelConfig, ShardingConfig
from tpu_experiments.config.schema import GROUPS, Config
from tpu_experiments.config.start import is_to_give
from tpu_experiments.config.task_schema import TokenizerTaskConfig
from tpu_experiments.config.words import with_machines

STARTING = ("train", "resume_check")
"""Tasks that begin from `start.run`."""
PROMPT = "Hello! What can you help me with?"
"""Sample prompt if neither the config nor the data names one."""


def to_config(composed: DictConfig) -> Config:
    """Convert Hydra's composed config to a typed, checked and named Config.

    Raises:
        ConfigError: a value is missing, of the wrong type, out of range or incompatible with another.
    """
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        raise ConfigError("\n".join(_missing(key) for key in missing))
    config: Any = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    problems = [*_unknown_keys(config), *_wrong_types(config)]
    if problems:
        raise ConfigError("\n".join(problems))
    if config.sample.prompt is None:
        config.sample.prompt = _prompt(config)
    if is_to_give(config.start.run) and (config.task.name not in STARTING or config.model.size == "tiny"):
        config.start.run = None  # plans and data need no weights, and a tiny model has none of that run
    check(config)
    if config.name is None and config.task.name == "report":
        config.name = "report"  # the other keys describe one run, and a report covers many
    if config.name is None and isinstance(config.task, TokenizerTaskConfig):
        config.name = _default_name(config.task.kind, list(config.data), str(config.task.vocab_size))
    if config.name is None:
        config.name = _default_name(_own_name(config.model) or _preset_name(config.model), *_rest_of_name(config))
        if len(config.name) > MAX_NAME_LENGTH:
            raise ConfigError(
                f"name=null; the name made of model, data and hw has {len(config.name)} letters and a folder's takes "
                f"{MAX_NAME_LENGTH}; write name=."
            )
    return config


def as_typed(composed: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Restore texts that Hydra read as numbers: `name=1E5`, `model.revision=12e5`, `name=1.10`.

    Hydra's grammar gives an unquoted value its own type, and OmegaConf then writes the number as text, in another form.
    """
    for line in overrides:
        key, equals, text = line.partition("=")
        key = key.lstrip("+")
        try:
            parsed = OverridesParser.create().parse_override(line).value() if equals else None
        except HydraException:  # refused where it is composed
            continue
        if isinstance(parsed, bool | int | float) and isinstance(OmegaConf.select(composed, key), str):
            OmegaConf.update(composed, key, text.strip())
    return _with_own_tokenizer(composed, {line.partition("=")[0].lstrip("+") for line in overrides})


def _with_own_tokenizer(composed: DictConfig, keys: Collection[str]) -> DictConfig:
    """Take the tokenizer of the model that `model.path=` names, not that of the preset's own.

    A local folder without a tokenizer keeps the preset's.

    Args:
        keys: those that were typed.
    """
    if "model.path" not in keys or "model.tokenizer_path" in keys:
        return composed
    folder = Path(str(OmegaConf.select(composed, "model.path")))
    if not folder.is_dir() or has_tokenizer(folder):
        OmegaConf.update(composed, "model.tokenizer_path", None)
    return composed


PLAIN_FOLDER = re.compile(
    r"model|merged|base|final|best|export|hf|snapshots|weights|checkpoint[-_]?\d*|step[-_]?\d*|[0-9a-f]*"
)
"""Names of folders that say nothing of the model in them."""


def _own_name(model: ModelConfig) -> str | None:
    """Return the name of a model of the user's own, from its folder or Hub id; None for one of conf/model."""
    if is_own(model):
        return None
    parts = [part for part in re.split(r"[/\\]", model.path) if part.strip(".")]
    first = next((at for at in reversed(range(len(parts))) if not PLAIN_FOLDER.fullmatch(parts[at].lower())), 0)
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", "-".join(parts[first:])).lstrip("._+-")[:60]
    return name or None


def _preset_name(model: ModelConfig) -> str:
    return model.name if model.size == "full" else f"{model.name}-{model.size}"


def _rest_of_name(config: Config) -> tuple[list[str], str]:
    return list(config.data), config.hw.name


def earlier_name(config: Config) -> str | None:
    """Return the name that a run had before models of the user's own had theirs; None where it is the same."""
    own = _own_name(config.model)
    if own is None or config.name != _default_name(own, *_rest_of_name(config)):
        return None
    return _default_name(_preset_name(config.model), *_rest_of_name(config))


def _default_name(model: str, sources: list[str], hw: str) -> str:
    """Return the selected names, joined; many sources become the first, the number of others and a hash."""
    name = "_".join([model, *sources, hw])
    if len(name) <= MAX_NAME_LENGTH:
        return name
    digest = hashlib.sha256(" ".join(sources).encode()).hexdigest()[:8]
    return "_".join([model, sources[0], f"and_{len(sources) - 1}_more", digest, hw])


def _prompt(config: Config) -> str:
    """Return the sample prompt, in the language of the data."""
    sources = sorted(config.data.values(), key=lambda source: source.kind == "text")
    return next((source.prompt for source in sources[:1] if source.prompt), PROMPT)


def require_single_choices(selected: Mapping[str, Any]) -> None:
    """Check the groups that take a single choice.

    `selected` is Hydra's `runtime.choices`, which leaves lists out.

    Raises:
        ConfigError: `model=[tiny,qwen05b]`, which Hydra would merge, or a `local` file that is not there.
    """
    problems = [
        f"{group} takes exactly one choice; write {group}=NAME with one of: {', '.join(choices(group))}."
        for group in GROUPS
        if group not in selected
    ]
    local = selected.get("local")
    if local not in (None, "default", *choices("local")):
        problems.append(f"local={local}; there is no conf/local/{local}.yaml. {suggest(str(local), choices('local'))}")
    if problems:
        raise ConfigError("\n".join(problems))


def _missing(key: str) -> str:
    if key in GROUPS:
        return f"{key}=???; no choice is made; write {key}=NAME with one of: {', '.join(choices(key))}."
    return f"{key}=???; it has no value; set it on the command line or in a YAML file."


def _unknown_keys(node: Any, prefix: str = "") -> Iterator[str]:
    """Yield keys that `+key=value` added outside the schema, where they would have no effect."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _unknown_keys(value, f"{prefix}{name}.")
    if not dataclasses.is_dataclass(node):
        return
    known = [field.name for field in dataclasses.fields(node)]
    for name, value in vars(node).items():
        if name in known:
            yield from _unknown_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={value}; there is no such key. {suggest(name, known)}"


def _wrong_types(config: Config) -> Iterator[str]:
    """Yield values of a wrong type: OmegaConf lets an interpolation put any node in place of a list."""
    for key, _, hint, value in walk(config):
        if not _fits(value, hint):
            shown = "null" if value is None else str(value)
            wanted = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
            yield f"{key}={shown:.100}; it must be of type {wanted}."


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value has a type of the schema: a class, a union, or a list or dict of them."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list) and all(_fits(part, parts[0]) for part in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(part, parts[1]) for part in value.values())
    if hint is float:
        return isinstance(value, int | float)
    return isinstance(value, hint)


def variant(*overrides: str) -> Config:
    """Compose this command's config again with further overrides, which take precedence.

    Raises:
        ConfigError: the checks or Hydra refuse them.
    """
    return _checked([*HydraConfig.get().overrides.task, *overrides])


def config_of(overrides: Sequence[str]) -> Config:
    """Compose the config of another command line.

    Raises:
        ConfigError: the checks or Hydra refuse it.
    """
    return _checked(overrides)


@cache
def machine(name: str) -> HwConfig:
    """Return a machine of conf/hw as its file defines it.

    Raises:
        ConfigError: there is no such file.
    """
    return _checked([f"hw={name}", "task=plan", "trainer.global_batch_rows=256", "~local"]).hw


@cache
def shipped(model: str, hw: str) -> Config:
    """Return the config of a model of conf/model on a machine of conf/hw, without other overrides.

    Raises:
        ConfigError: there is no such file.
    """
    return _checked([f"model={model}", f"hw={hw}", "task=plan", "trainer.global_batch_rows=256", "~local"])


@cache
def sharding_table(name: str) -> ShardingConfig:
    """Return a table of conf/sharding as its file defines it.

    Raises:
        ConfigError: there is no such file.
    """
    return _checked([f"sharding={name}", "task=plan", "~local"]).sharding


def _checked(overrides: Sequence[str]) -> Config:
    try:
        return to_config(_composed(list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(sentence(error)) from error


def _composed(overrides: list[str]) -> DictConfig:
    overrides = with_machines(overrides, choices("hw"))
    if GlobalHydra.instance().is_initialized():
        return as_typed(compose("config", overrides=overrides), overrides)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return as_typed(compose("config", overrides=overrides), overrides)
