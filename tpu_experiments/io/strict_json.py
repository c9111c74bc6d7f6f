"""Strict JSON: NaN and infinities, which JSON lacks, are written as null and refused on reading."""

import json
import math
from typing import Any, NoReturn


class NotStrictError(ValueError):
    """Text beyond strict JSON that Python's json accepts (NaN, infinities, duplicate names), or too deep."""


def loads(text: str | bytes) -> Any:
    """Parse JSON text.

    Raises:
        NotStrictError: NaN, an infinity, a name that occurs twice in one object, or too deep nesting.
        ValueError: it is not JSON.
    """
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except RecursionError as error:
        raise NotStrictError("it is nested too deeply") from error


def _no_constant(name: str) -> NoReturn:
    raise NotStrictError(f"it holds {name}, which is no number of JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise NotStrictError(f"{name!r} comes twice")
        values[name] = value
    return values


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Return the JSON text of a value.

    It may consist of dicts, lists, strings, numbers (numpy and torch scalars too), bools and None.

    Raises:
        TypeError: a value of another type.
    """
    return json.dumps(_plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
