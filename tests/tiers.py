"""Cases of which some are left to `pytest -m slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def only(kept: Iterable[str], cases: Iterable[Any], *, name: Any = str) -> list[Any]:
    """Mark as slow every case whose name is not among those that are kept in each run."""
    names = set(kept)
    return [case if name(case) in names else pytest.param(case, marks=pytest.mark.slow) for case in cases]
