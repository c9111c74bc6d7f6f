"""Strict JSON: NaN and the infinities are written as null and refused on reading; entries are read by their kind."""

import json
import math
from typing import Any, NoReturn

LARGEST = 1e30
"""Limit of numbers: beyond it the arithmetic of charts overflows, and no run has such a value."""
ANY = "*"
"""Wildcard for the names of an object."""
INTERVAL = {"loss": {"low": float, "high": float}}
ACCOUNT = {"wall_seconds": float, "lives": float, "seconds": {ANY: float}, "usd": {"on_demand": float, "spot": float}}
RESULT = {
    "status": str,
    "stages": [{"steps": int}],
    "eval_measures": {ANY: float},
    "eval_sources": {ANY: float},
    "sample_before": str,
    "sample_after": str,
    "findings": [{"message": str}],
    "adapter_path": str,
    "ranked_by": str,
    "num_trainable": int,
    "goodput": {"run": ACCOUNT},
    ANY: float,
}
TEST = {"loss": float, "bits_per_byte": float, "sources": {ANY: {"trained": INTERVAL, "base": INTERVAL}}}
FIGURE = {"value": float, "low": float, "high": float}
BENCHMARKS = {"benchmarks": {ANY: {"trained": FIGURE, "base": FIGURE}}}
RECORD = {"step": int, ANY: float}


def shaped(value: Any, shape: Any) -> Any:
    """Return the parts of `value` that match the shape; None if nothing does.

    Args:
        shape: `str`, `int`, `float` (finite, integers included), a list of one shape that all items must match, or a
            dict of shapes by name, where `ANY` is the shape of all other names.
    """
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return None
        found = {name: shaped(item, shape.get(name, shape.get(ANY))) for name, item in value.items()}
        return {name: item for name, item in found.items() if item is not None}
    if isinstance(shape, list):
        items = [shaped(item, shape[0]) for item in value] if isinstance(value, list) else [None]
        return None if any(not item for item in items) else items
    if shape is str:
        return value if isinstance(value, str) else None
    if shape is None or isinstance(value, bool) or not isinstance(value, int if shape is int else int | float):
        return None
    return value if abs(value) < LARGEST else None  # False for NaN too


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
