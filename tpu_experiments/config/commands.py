"""The one writer of commands: values quoted for Hydra's grammar, and the whole line for the shell.

Whatever prints or writes a command, or a part of one, takes it from here.
"""

import re
import shlex
from collections.abc import Mapping
from typing import Any

from tpu_experiments.config.folders import IS_INSTALLED

PROGRAM = ("tpu-experiments",) if IS_INSTALLED else ("python", "run.py")
PLAIN = re.compile(r"[A-Za-z0-9_./:+-]+")
ESCAPED = re.compile(r"\\*[()\[\]{}:=,\s]|\\+\Z")
"""Characters of a key that Hydra's grammar takes for its own, with the backslashes in front of them."""
OF_ANOTHER_TYPE = re.compile(r"null|true|false|[+-]?(inf|nan|[0-9_]*\.?[0-9_]*(e[+-]?[0-9_]+)?)", re.IGNORECASE)
"""Texts that Hydra reads as null, a truth value or a number."""


def command(*words: str) -> str:
    """Return the command line of run.py with these arguments, quoted for the shell.

    >>> command("task=export", override_of("task.run", "outputs/a b/lora.r=4"))
    'python run.py task=export \\'task.run="outputs/a b/lora.r=4"\\''
    """
    return shlex.join([*PROGRAM, *words])


def typed(*words: str) -> str:
    """Return arguments as they are typed behind a command, quoted for the shell."""
    return shlex.join(words)


def override_of(key: str, value: Any) -> str:
    """Return `key=value` in Hydra's command line syntax."""
    return f"{key}={_written(value)}"


def _written(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(_written(part) for part in value)}]"
    if isinstance(value, Mapping):
        parts = (f"{ESCAPED.sub(_escaped, str(key))}:{_written(part)}" for key, part in value.items())
        return "{" + ",".join(parts) + "}"
    if isinstance(value, str):
        is_plain = PLAIN.fullmatch(value) and not OF_ANOTHER_TYPE.fullmatch(value)
        return value if is_plain else _quoted(value)
    return str(value)


def _escaped(found: re.Match[str]) -> str:
    """Return characters of a key with a backslash before each; elsewhere a backslash stands for itself."""
    return re.sub(r"(.)", r"\\\1", found[0])


def _quoted(text: str) -> str:
    """Return a quoted text of Hydra's grammar, whose backslashes escape only in front of a quote or of `${`."""
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    text = re.sub(r'(\\*)"', r'\1\1\\"', text)
    return '"' + re.sub(r"(\\+)\Z", r"\1\1", text) + '"'
