"""The order of runs: the measure that their objective names (`ranked_by`), the highest first, and then the loss."""

import math
from collections.abc import Mapping
from typing import Any


def ranking_measure(result: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return name and value of the measure that ranks the run of a result.json; None where the loss alone does."""
    name = result.get("ranked_by")
    value = None if name is None else (result.get("eval_measures") or {}).get(name)
    return None if value is None else (str(name), float(value))


def rank(measure: float | None, loss: float | None) -> tuple[float, float]:
    """Return a sort key, lowest for the best."""
    return math.inf if measure is None else -measure, math.inf if loss is None else loss
