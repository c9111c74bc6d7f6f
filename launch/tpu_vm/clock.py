"""Clock of the launcher, replaced by a simulated one in the tests."""

import time
from typing import Protocol


class Clock(Protocol):
    """Protocol of the clock."""

    def now(self) -> float:
        """Return the time in seconds since 1970."""

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""


class WallClock:
    """Clock of the operating system."""

    def now(self) -> float:
        """Return the time in seconds since 1970."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        time.sleep(seconds)
