"""Rewriting of the command line for Hydra: overlays (`+plan=FILE`), and new keys in data mappings."""

import re
from collections.abc import Collection, Mapping
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from tpu_experiments.config.commands import override_of
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.trust import search_keys, setting_problem
from tpu_experiments.config.yaml_bounds import OF_VALUES, require_bounded

OPTION = re.compile(r"\+{0,2}plan=(.+)")
OWN_ENTRIES = re.compile(r"data\.([^.=]+)\.(?:fields|questions|keep)[.=].*", re.DOTALL)
"""Overrides of a source's mappings, whose keys the user chooses; Hydra requires a `+` before a new key."""


def overlay_file(arguments: list[str]) -> str | None:
    """Return the FILE of `+plan=FILE` among the arguments, or None.

    Raises:
        ConfigError: there are two.
    """
    files = [_unquoted(match[1]) for match in map(OPTION.fullmatch, arguments) if match]
    if len(files) > 1:
        raise ConfigError(f"+plan={files[1]}; +plan={files[0]} is given as well; one overlay can be laid under a run.")
    return files[0] if files else None


def _unquoted(value: str) -> str:
    """Return the text of a value that may be quoted as Hydra's grammar has it."""
    if value[0] not in "'\"":
        return value
    try:
        return str(OverridesParser.create().parse_override(f"plan={value}").value()).replace("\\${", "${")
    except HydraException:
        return value.strip("'\"")


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
