"""Which calls of a program are traced: the first ones, then every n-th, and all where two traces were not the same.

A trace costs the host far more than running the graph that it builds. Python would build the same graph as long as
nothing but tensors changes; that is looked at every n-th time.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Kept = TypeVar("Kept")
NUM_FIRST = 3
"""Traces in a row that must be the same before a call is not traced. The second may find tensors that the first wrote,
the third is the first that comes after two calls of one kind."""
MAX_READING_SECONDS = 600.0


@dataclass(frozen=True)
class Change:
    """What a trace found to be otherwise than the trace before it."""

    number: str
    """Which number changed that Python hands to the program; empty where it is the graph."""
    num_replayed: int
    """Calls between the two, which ran as the former trace says."""


class Calls(Generic[Kept]):
    """The calls of one program with inputs of one signature."""

    def __init__(self, *, every: int, differ: Callable[[Kept, Kept], str | None]) -> None:
        """`differ` says what makes two traces differ: None for nothing, empty for the graph, else a number."""
        self.every, self.differ = every, differ
        self.num_traced = self.num_replayed = 0
        self.is_recorded = True
        """Whether a trace can be kept."""
        self._last: Kept | None = None
        self._num_same = 0
        self._is_steady = every > 1

    def replayable(self) -> Kept | None:
        """The trace that stands for the next call; None where it should be traced."""
        is_known = self._is_steady and self._num_same >= NUM_FIRST and self.num_replayed < self.every - 1
        return self._last if is_known else None

    def replayed(self) -> None:
        """A call was not traced."""
        self.num_replayed += 1

    def traced(self, now: Kept | None) -> Change | None:
        """A call was traced, None where that cannot be kept; what had changed, said once."""
        before, num_replayed = self._last, self.num_replayed
        self._last, self.num_replayed = now, 0
        self.num_traced += 1
        if now is None:
            self.is_recorded = self._is_steady = False
            return None
        number = None if before is None else self.differ(before, now)
        self._num_same += 1
        if number is None or not self._is_steady:
            return None
        self._is_steady = False
        return Change(number, num_replayed)


class Reader:
    """Keeps the calls of a program at most one ahead of what another thread reads of them.

    Reading needs torch_xla's lock of the device, which calls that are not traced take again at once: the loss of ten
    steps was read ten steps late. The call after the one that is read is queued meanwhile, so the device has work.
    """

    def __init__(self) -> None:
        self._call, self._done = 0, threading.Event()
        self._done.set()

    def wait(self, call: int) -> None:
        """Before the call of this number. A thread that failed is told of at the next reading; it is not waited for."""
        if call > self._call + 1:
            self._done.wait(MAX_READING_SECONDS)

    def of(self, call: int, then: Callable[[Any], None]) -> Callable[[Any], None]:
        """`then` for the outputs of the call of this number."""
        self._call, done = call, threading.Event()
        self._done = done

        def read(out: Any) -> None:
            try:
                then(out)
            finally:
                done.set()

        return read
