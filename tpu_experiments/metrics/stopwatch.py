"""Wall time by activity, for `seconds` of result.json."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Exclusive wall seconds per activity: an inner `measure` is taken off the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner: list[float] = []

    @contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Add the time spent inside to `activity`."""
        started = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            total = time.perf_counter() - started
            own = total - self._inner.pop()
            self.seconds[activity] = self.seconds.get(activity, 0.0) + own
            if self._inner:
                self._inner[-1] += total
