"""From Hydra's composed config to the plain dataclass that everything below run.py receives."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tpu_experiments.config.checks import MAX_NAME_LENGTH, check
from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.config.help import choices
from tpu_experiments.config.schema import GROUPS, Config


def to_config(composed: DictConfig) -> Config:
    """Typed, checked and named.

    Raises:
        ConfigError: a value is missing, of the wrong type, out of range or does not go with another.
    """
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        raise ConfigError("\n".join(_missing(key) for key in missing))
    config: Any = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    unknown = list(_unknown_keys(config))
    if unknown:
        raise ConfigError("\n".join(unknown))
    check(config)
    if config.name is None:
        model = config.model.name if config.model.size == "full" else f"{config.model.name}-{config.model.size}"
        config.name = "_".join([model, *config.data, config.hw.name])
        if len(config.name) > MAX_NAME_LENGTH:
            raise ConfigError(
                f"name=null; the name made of model, {len(config.data)} sources and hw has {len(config.name)} letters "
                f"and a folder's takes {MAX_NAME_LENGTH}; write name=."
            )
    return config


def require_single_choices(selected: Mapping[str, Any]) -> None:
    """Check the groups that take one choice; `selected` is Hydra's `runtime.choices`, which leaves lists out.

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
    """Keys that `+key=value` put where the schema has none; they would change nothing."""
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
