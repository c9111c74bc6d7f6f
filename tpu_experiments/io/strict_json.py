"""Strict JSON: NaN and the infinities, which JSON has no words for, are written as null."""

import json
import math
from typing import Any


def dumps(value: Any, *, indent: int | None = None) -> str:
    """JSON text of dicts, lists, strings, numbers (numpy and torch scalars too), bools and None.

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
