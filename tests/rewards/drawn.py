"""A reward that is another at every call, and fails now and then, for the tests."""

import random
import time
import zlib
from collections.abc import Mapping
from typing import Any


def drawn(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """A number of the operating system's; every eighth answer or so has none."""
    number = random.SystemRandom().random()
    if number < 0.125:
        raise ValueError("no luck")
    return number


def marked(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """A number of the text, another for any other."""
    return zlib.crc32(completion.encode()) / 2**32


def never(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Nothing but an error."""
    raise ValueError("never")


def slow(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """A number of the text behind a tenth of a second, so that a run can be killed in it."""
    time.sleep(0.1)
    return marked(prompt, completion, row)
