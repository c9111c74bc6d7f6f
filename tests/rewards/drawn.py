"""A reward that is another at every call, and fails now and then, for the tests."""

import random
from collections.abc import Mapping
from typing import Any


def drawn(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """A number of the operating system's; every eighth answer or so has none."""
    number = random.SystemRandom().random()
    if number < 0.125:
        raise ValueError("no luck")
    return number


def never(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Nothing but an error."""
    raise ValueError("never")
