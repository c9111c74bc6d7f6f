"""Wall time by activity, for `seconds` and `goodput` of result.json."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Exclusive wall seconds per activity: an inner `measure` is subtracted from the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.compiled: dict[str, float] = {}
        """The part of `seconds` that was compilation."""
        self._open: list[str] = []
        self._switched = time.perf_counter()
        self._compile_seconds: Callable[[], float] = lambda: 0.0
        self._compiled_before = 0.0

    def watch_compiler(self, compile_seconds: Callable[[], float]) -> None:
        """Read compile times from `compile_seconds`, the total of this process so far."""
        self._compile_seconds, self._compiled_before = compile_seconds, 0.0

    @contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Add the time spent inside to `activity`."""
        self.settle()
        self._open.append(activity)
        try:
            yield
        finally:
            self.settle()
            self._open.pop()

    def settle(self) -> None:
        """Add the time up to this moment to the innermost open activity."""
        now, compiled = time.perf_counter(), self._compile_seconds()
        for sums, amount in ((self.seconds, now - self._switched), (self.compiled, compiled - self._compiled_before)):
            if self._open:
                sums[self._open[-1]] = sums.get(self._open[-1], 0.0) + amount
        self._switched, self._compiled_before = now, compiled
