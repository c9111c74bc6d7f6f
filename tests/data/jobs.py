"""Workers for test_workers.py; another process imports this module."""

import os
import time
from pathlib import Path


class Squarer:
    def __init__(self, offset: int) -> None:
        self.offset = offset

    def __call__(self, number: int) -> tuple[int, int]:
        """(offset + number squared, the process that did it)."""
        if number < 0:
            raise ValueError(f"no square of {number}")
        return self.offset + number * number, os.getpid()


class Waiter:
    """A worker that, in another process than the one given, works only once that process has said so."""

    def __init__(self, settings: tuple[int, Path]) -> None:
        self.owner, self.flag = settings

    def __call__(self, number: int) -> tuple[int, int]:
        """(number, the process that did it)."""
        if os.getpid() == self.owner:
            self.flag.touch()
        while not self.flag.exists():
            time.sleep(0.01)
        return number, os.getpid()
