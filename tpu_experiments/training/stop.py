"""A request to stop (SIGTERM of a spot reclaim, Ctrl-C) as a flag that the loop looks at between two steps."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from tpu_experiments.io import grace
from tpu_experiments.io.grace import Grace
from tpu_experiments.runtime import stopping

STOPPED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: the same command, given again, goes on


class StoppedByRequest(Exception):
    """The run was asked to stop, saved a checkpoint and did."""


class StopFlag:
    """Set by SIGTERM and by the first Ctrl-C; a second Ctrl-C interrupts at once.

    Where the run is several processes of one machine, the one that started them has taken over the signals
    (runtime/stopping.py).

    Args:
        agree: whether it is true of one of the run's processes; all call it.
    """

    def __init__(self, grace_seconds: float, *, agree: Callable[[bool], bool]) -> None:
        self._agree = agree
        self.grace = Grace(grace_seconds, asked_at=self.asked_at)
        self._asked_at: float | None = None

    def install(self) -> None:
        """Take over the signals; only the main thread may. Storage is waited for as long as a request leaves time."""
        self.grace.install()
        if stopping.joined() is None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._request)
            signal.signal(signal.SIGINT, self._request)

    def agreed(self) -> bool:
        """Whether to stop here; every process of the run calls it at the same points, and all stop at the same."""
        joined = stopping.joined()
        if joined is None:
            if not self._agree(self._asked_at is not None):
                return False
            self._asked_at = self._asked_at or time.monotonic()  # another host was asked
            return True
        request, rank = joined
        return request.agreed(rank)

    def asked_at(self) -> float | None:
        """When the request came, on the monotonic clock; None before."""
        joined = stopping.joined()
        return self._asked_at if joined is None else joined[0].asked_at

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self._asked_at is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked_at = self._asked_at or time.monotonic()


@contextmanager
def parting(grace_seconds: float) -> Iterator[None]:
    """Inside, children may do the work; where they were asked to stop, what this process does later is in a hurry."""
    try:
        yield
    finally:
        if stopping.children_asked_at() is not None:
            Grace(grace_seconds, asked_at=stopping.children_asked_at).install().leave()


@contextmanager
def ending_in_time() -> Iterator[None]:
    """Around a run that may end with an exit code: at once where storage was left behind, for nobody waits for it."""
    try:
        yield
    except SystemExit as ending:
        if grace.is_over():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ending.code if isinstance(ending.code, int) else 1)
        raise
