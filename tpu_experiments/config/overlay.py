"""Rewriting of the command line for Hydra: overlays (`+plan=FILE`), and new keys in data mappings."""

import re
from collections.abc import Collection, Mapping
from typing import Any

import yaml

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.trust import search_keys, setting_problem
from tpu_experiments.config.yaml_bounds import OF_VALUES, require_bounded

PLAIN = re.compile(r"[\w./:+-]+")
OPTION = re.compile(r"\+{0,2}plan=(.+)")
OWN_ENTRIES = re.compile(r"data\.([^.=]+)\.(?:fields|questions|keep)[.=].*", re.DOTALL)
"""Overrides of a source's mappings, whose keys the user chooses; Hydra requires a `+` before a new key."""


def override_of(key: str, value: Any) -> str:
    """Return `key=value` in Hydra's command line syntax."""
    return f"{key}={_written(value)}"


def overlay_file(arguments: list[str]) -> str | None:
    """Return the FILE of `+plan=FILE` among the arguments, or None.

    Raises:
        ConfigError: there are two.
    """
    files = [match[1].strip("'\"") for match in map(OPTION.fullmatch, arguments) if match]
    if len(files) > 1:
        raise ConfigError(f"+plan={files[1]}; +plan={files[0]} is given as well; one overlay can be laid under a run.")
    return files[0] if files else None


def with_overlay(arguments: list[str], *, text: str, file: str) -> list[str]:
    """Replace `+plan=FILE` by the overlay's overrides; other arguments take precedence over them.

    Raises:
        ConfigError: the text is no overlay.
    """
    others = [argument for argument in arguments if not OPTION.fullmatch(argument)]
    given = {argument.partition("=")[0].lstrip("+~") for argument in others}
    found = _entries(text, file=file, given=given)
    return [override_of(key, value) for key, value in found.items()] + others


def with_own_entries(arguments: list[str]) -> list[str]:
    """Return the arguments with `++` before overrides that may add entries to a source's mappings.

    >>> with_own_entries(["data.law.fields.text=body", "data.law.kind=text"])
    ['++data.law.fields.text=body', 'data.law.kind=text']
    """
    return [f"++{argument}" if OWN_ENTRIES.fullmatch(argument) else argument for argument in arguments]


def _entries(text: str, *, file: str, given: Collection[str]) -> dict[str, Any]:
    """Return the settings of an overlay that the command line does not give itself."""
    advice = "give the best.yaml that task=plan task.explore=search wrote, or a file of lines `key: value`."
    require_bounded(text, place=f"+plan={file}")
    try:
        found = yaml.safe_load(text)
    except yaml.constructor.ConstructorError as error:
        raise ConfigError(f"+plan={file}; YAML tags are not taken ({error.problem}); {advice}") from error
    except (yaml.YAMLError, *OF_VALUES) as error:
        raise ConfigError(f"+plan={file}; it is not YAML ({str(error).splitlines()[0]}); {advice}") from error
    if not isinstance(found, Mapping) or not found:
        raise ConfigError(f"+plan={file}; it holds no overrides; {advice}")
    found = {str(key): value for key, value in found.items() if str(key) not in given}
    for key, value in found.items():
        why = setting_problem(key, value, taken=search_keys())
        if why is not None:
            raise ConfigError(
                f"+plan={file}; {why}; a file may come from anywhere: type what you want of it on the command line, "
                f"or {advice}"
            )
    return found


def _written(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(_written(part) for part in value)}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_written(part)}" for key, part in value.items()) + "}"
    text = str(value)
    return text if PLAIN.fullmatch(text) else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
