"""Makers of dataclass fields with allowed values and ranges, which OmegaConf cannot express, and a walk over them.

`checks.py` reads them from the field's metadata, and reports a value out of range together with all other problems.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import field
from typing import Any, get_type_hints

from omegaconf import MISSING


def choice(*allowed: str, default: str | None = MISSING) -> Any:
    """Return a string field restricted to `allowed` (OmegaConf 2.3 has no Literal)."""
    return field(default=default, metadata={"allowed": allowed})


def number(
    *,
    default: Any = MISSING,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    word: str | None = None,
) -> Any:
    """Return a numeric field with bounds; `None` and `word` are accepted as well.

    The field's docstring says what they mean.
    """
    bounds = {"at_least": at_least, "above": above, "at_most": at_most, "below": below, "word": word}
    metadata = {name: value for name, value in bounds.items() if value is not None}
    return field(default=default if default is not NO_DEFAULT else MISSING, metadata=metadata)


def walk(node: Any, prefix: str = "") -> Iterator[tuple[str, "dataclasses.Field[Any]", Any, Any]]:
    """Yield dotted key, field, type and value of every field of a config; those of a part come before its own."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from walk(value, f"{prefix}{name}.")
    if not dataclasses.is_dataclass(node):
        return
    hints = get_type_hints(type(node))
    for spec in dataclasses.fields(node):
        key, value = f"{prefix}{spec.name}", getattr(node, spec.name)
        yield from walk(value, f"{key}.")
        yield key, spec, hints[spec.name], value
