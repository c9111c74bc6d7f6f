"""What a file from somebody else may set in a config: overlays, tables of settings, stored configs, packs.

The command line and the user's own config folders may set everything. Any other file may have come from anywhere: it
sets what its list here names, to values of the schema, and code, places and permissions only where the command line
says the same.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from tpu_experiments.config.checks import field_problems
from tpu_experiments.config.data_schema import DataSourceConfig
from tpu_experiments.config.fields import walk
from tpu_experiments.config.folders import CONF, REPOSITORY
from tpu_experiments.config.model_schema import REPLACED_TOKEN_MODEL, ModelConfig
from tpu_experiments.config.objectives import TARGETS
from tpu_experiments.config.schema import (
    GROUPS,
    STATE_BYTES,
    Config,
    TrainerConfig,
)

SEARCH = CONF / "task" / "plan.yaml"
CHOICE = re.compile(r"\w[\w.-]*")
"""Name of a file of a config group; no path."""
LOGGERS = {
    "console.ConsoleLogger",
    "jsonl.JsonlLogger",
    "mlflow.MlflowLogger",
    "probe.Probe",
    "tensorboard.TensorBoardLogger",
    "trackio.TrackioLogger",
    "wandb.WandbLogger",
}
CALLBACKS = ("commands.RunCommand", "copies.CopyFolder", "limits.StopAfter", "metrics.WatchMetrics")
LOGGER_PACKAGES = ("tpu_experiments.loggers", "tpu_experiments.logging")
"""Packages whose loggers a stored config may name; runs from before the package was renamed have the second."""
OWN_TARGETS: dict[str, frozenset[str]] = {
    "model": frozenset({ModelConfig._target_, REPLACED_TOKEN_MODEL}),
    "data.*": frozenset({DataSourceConfig._target_}),
    "objective": TARGETS,
    "optim": frozenset(STATE_BYTES),
    "trainer": frozenset({TrainerConfig._target_}),
    "logger.*": frozenset(f"{package}.{name}" for package in LOGGER_PACKAGES for name in LOGGERS),
    "callbacks.*": frozenset(f"tpu_experiments.callbacks.{name}" for name in CALLBACKS),
}
"""Targets that a stored config may name, by swap point. They are listed by full name, since the package also has
functions that must not be called from a config."""
INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
"""`${` that OmegaConf would resolve; after an odd number of backslashes it is plain text."""
TEMPLATES = (".jinja", ".jinja2", ".j2")
"""Suffixes of a chat template that a stored config may name."""
SYSTEM = tuple(map(Path, ("/etc", "/proc", "/sys", "/dev", "/run", "/boot", "/var")))
OF_EACH_POINT = ("lora", "objective", "optim", "schedule", "seed", "name")
"""Keys, or groups of keys, in which the runs of a pack differ (sweeping/packs.py)."""
OF_EACH_SHOWN = ", ".join(OF_EACH_POINT)


# ---- plans and tables ---------------------------------------------------------------------------------------


@cache
def search_keys() -> tuple[str, ...]:
    """Return the keys and groups that task=plan task.explore=search varies: the axes of conf/task/plan.yaml."""
    return tuple(yaml.safe_load(SEARCH.read_text(encoding="utf-8"))["search"]["axes"])


def setting_problem(key: str, value: Any, *, taken: Collection[str]) -> str | None:
    """Return why a file may not set a key to this value, without its full stop; None where it may.

    Args:
        taken: keys that files of this kind may set.
    """
    if key not in taken:
        return f"it sets {str(key)!r:.80}, and such a file may set only {', '.join(taken)}"
    if key in GROUPS:
        is_choice = isinstance(value, str) and CHOICE.fullmatch(value)
        return None if is_choice else f"{key}={value!r:.60} is no name of a file in conf/{key}"
    spec, hint = _field_of(key)
    if not _is_of_kind(value, hint):
        shown = hint.__name__ if isinstance(hint, type) else str(hint)
        return f"{key}={value!r:.60} is not of type {shown}"
    wrong = next(field_problems(spec, key, value), None)
    return None if wrong is None else wrong.rstrip(".")


def _field_of(key: str) -> tuple["dataclasses.Field[Any]", Any]:
    """Return the schema's field of `group.key`, and its type."""
    kind: Any = Config
    *groups, name = key.split(".")
    for group in groups:
        kind = get_type_hints(kind)[group]
    return next(each for each in dataclasses.fields(kind) if each.name == name), get_type_hints(kind)[name]


def _is_of_kind(value: Any, hint: Any) -> bool:
    kinds = get_args(hint) or (hint,)
    if get_origin(hint) is list:
        return isinstance(value, list) and all(type(item) in kinds for item in value)
    return type(value) in kinds or (float in kinds and type(value) is int)


# ---- stored configs -----------------------------------------------------------------------------------------


def stored_problems(stored: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    """Yield problems of stored values that would run code, or read values from outside the config.

    Args:
        own: the command's config, flattened; what it says too is taken.
    """
    allowed, plugins = list(own["plugins"]), stored.get("plugins") or []
    for plugin in plugins if isinstance(plugins, list) else [plugins]:
        if plugin not in allowed:
            yield (
                f"plugins has {plugin!r}, which would be imported; a run folder may come from anywhere: read that "
                f"code, then add 'plugins=[{plugin}]' to this command."
            )
    for key, value in leaves(stored):
        text = f"{key} {value}" if isinstance(value, str) else key
        if INTERPOLATION.search(text):
            yield f"{key} holds an interpolation (${{...}}), which could read the environment; write the value itself."
        group, _, field = key.rpartition(".")
        if field == "_target_" and not _is_allowed(group, str(value), own):
            yield (
                f"{key}={value} is none of this project's classes for that place; a run folder may come from "
                "anywhere: read that code, then add 'plugins=[PACKAGE]' with its package to this command."
            )
    model = stored.get("model")
    remote_code = model.get("remote_code", "refuse") if isinstance(model, dict) else "refuse"
    if remote_code == "run" and own.get("model.remote_code") != "run":
        yield (
            "model.remote_code=run would run code of the checkpoint; a run folder may come from anywhere: read that "
            "code, then add model.remote_code=run to this command."
        )


def _is_allowed(group: str, target: str, own: Mapping[str, Any]) -> bool:
    """Return whether a stored config may name `target` at the swap point `group`."""
    point, _, name = group.partition(".")
    if target in OWN_TARGETS.get(f"{point}.*" if name and "." not in name else group, ()):
        return True
    return target == own.get(f"{group}._target_") or any(target.startswith(f"{each}.") for each in own["plugins"])


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of all leaves, in lists too."""
    if isinstance(node, dict | list):
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        for name, value in pairs:
            yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
        if not node:
            yield prefix, None
    else:
        yield prefix, node


def place_problems(values: Mapping[str, Any], own: Mapping[str, Any], *, folder: str) -> Iterator[str]:
    """Yield the local files of a stored config that are not read unless the command names them too.

    These are a chat template of another suffix than Jinja's, and what lies in a folder of the system or a hidden one,
    or is reached through a link. Files below the run folder, the working folder and the repository are read.

    Args:
        values: groups of the config, as the schema has them.
        own: the command's config, flattened.
        folder: the run folder.
    """
    known = {str(value) for value in own.values()}
    for key, text, kind in _places(values):
        if text in known or ("://" in text and not text.startswith("file://")):
            continue
        why = _why_not_read(text, kind=kind, folder=folder)
        if why is not None:
            yield (
                f"{key}={text!r:.200} {why}; a run folder may come from anywhere: look at that file, then add {key}= "
                "with this value to the command, or, of task=evaluate, take other data with task.data=selected "
                "data=NAME."
            )


def _places(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield key, value and kind of every path of a config that is only read."""
    for key, spec, _, value in walk(values):
        kind = spec.metadata.get("place")
        if kind not in (None, "folder") and value is not None:
            named = value.items() if isinstance(value, dict) else [(None, value)]
            yield from ((f"{key}{f'.{name}' if name else ''}", str(text), kind) for name, text in named)


def _why_not_read(text: str, *, kind: str, folder: str) -> str | None:
    given = Path(text.removeprefix("file://")).expanduser()
    found = next((place for place in (given, REPOSITORY / given) if place.exists()), given)
    place = found.resolve()
    if kind == "local" and place.suffix.lower() not in TEMPLATES:
        return f"is no file that ends in {', '.join(TEMPLATES)}"
    if "://" not in folder and _is_below(found.absolute(), Path(folder).absolute()):
        return None if _is_below(place, Path(folder).resolve()) else "is a link that leads out of the run folder"
    if any(_is_below(place, own) for own in (Path.cwd(), REPOSITORY)):
        return None
    system = next((each for each in SYSTEM if _is_below(place, each)), None)
    if system is not None:
        return f"lies in {system}, a folder of the system"
    hidden = next((part for part in place.parts if part.startswith(".") and part != ".cache"), None)
    return None if hidden is None else f"lies in {hidden!r:.60}, a hidden folder or file"


def _is_below(place: Path, folder: Path) -> bool:
    return place == folder or folder in place.parents


# ---- packs --------------------------------------------------------------------------------------------------


def pack_problem(words: Iterable[str], own: Collection[str]) -> str | None:
    """Return why a command line of a pack's folder is not run, without its full stop; None where it is.

    Its runs differ from the command that the sweep started in the keys of `OF_EACH_POINT` alone, or in the files of the
    user's own config folders that they choose. output_dir is in the words of each, as in the command's.

    Args:
        own: words of this command.
    """
    for word in words:
        key, _, value = word.partition("=")
        is_of_each = key.partition(".")[0] in OF_EACH_POINT and not key.endswith("_target_")
        is_choice = key in (*GROUPS, "experiment") and CHOICE.fullmatch(value)
        if not (word in own or is_of_each or is_choice):
            return f"{word!r:.100} is none of this command's words, and runs of a pack differ in {OF_EACH_SHOWN} alone"
    return None
