"""Schemas of the JSON in a run folder; reports and leaderboards use only entries that match them."""

from typing import Any

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
    "adapter_path": str,
    "num_trainable": int,
    "goodput": {"run": ACCOUNT},
    ANY: float,
}
TEST = {"loss": float, "bits_per_byte": float, "sources": {ANY: {"trained": INTERVAL, "base": INTERVAL}}}
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
