"""Time; simulated in the tests."""

import time
from typing import Protocol


class Clock(Protocol):
    """Time; simulated in the tests."""

    def now(self) -> float:
        """Seconds since 1970."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class WallClock:
    """The real one."""

    def now(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)
