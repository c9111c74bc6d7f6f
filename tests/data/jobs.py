"""Workers for test_workers.py; another process imports this module."""

import os


class Squarer:
    def __init__(self, offset: int) -> None:
        self.offset = offset

    def __call__(self, number: int) -> tuple[int, int]:
        """(offset + number squared, the process that did it)."""
        if number < 0:
            raise ValueError(f"no square of {number}")
        return self.offset + number * number, os.getpid()
