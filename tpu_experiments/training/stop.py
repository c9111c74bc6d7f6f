"""Requests to stop (SIGTERM of a spot reclaim, Ctrl-C), as a flag that the loop checks between steps."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

from tpu_experiments.runtime.processes import stopping
from tpu_experiments.storage import retry
from tpu_experiments.storage.retry import Grace

STOPPED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: repeating the command resumes the run


class StoppedByRequest(Exception):
    """The run was asked to stop, saved a checkpoint and stopped; the text says by what, if not by a signal."""


class StopFlag:
    """Flag set by SIGTERM and by the first Ctrl-C; a second Ctrl-C interrupts at once.

    With several processes on one machine, their parent handles the signals (runtime/processes/stopping.py).

    Args:
        agree: returns whether its argument is true in any of the run's processes; all must call it.
    """

    def __init__(self, grace_seconds: float, *, agree: Callable[[bool], bool]) -> None:
        self._agree = agree
        self.grace = Grace(grace_seconds, requested_at=self.requested_at)
        self._requested_at: float | None = None
        self._is_dropped = False

    def install(self) -> None:
        """Install the signal handlers (main thread only) and limit storage waits to the grace period."""
        self.grace.install()
        if stopping.joined() is None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._request)
            signal.signal(signal.SIGINT, self._request)

    def end_where_stuck(self, may_end: Callable[[], bool]) -> None:
        """End the process once the grace period is over, if the work has not come to an end and `may_end` says so.

        Python runs no signal handler while the main thread waits for a compiler or a device; the wake-up pipe is
        written to all the same. Call it in the main thread of the process that writes, in a run on one machine; with
        it end its other processes.
        """
        joined = stopping.joined()
        if joined is not None:
            asked = joined[0].wait
        elif threading.current_thread() is threading.main_thread():
            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            asked = partial(_wait_for_signal, reading)
        else:
            return
        threading.Thread(target=self._end, args=(asked, may_end), name="stuck", daemon=True).start()

    def _end(self, asked: Callable[[], None], may_end: Callable[[], bool]) -> None:
        asked()
        time.sleep(self.grace.seconds)
        while not may_end() or self.grace.is_leaving:
            time.sleep(1.0)
        print("stopped on request, inside a compilation or a load; the same command goes on from its last checkpoint")
        sys.stdout.flush()
        os._exit(STOPPED_EXIT_CODE)

    def request(self) -> None:
        """Ask the run to stop, as the signals do."""
        self._requested_at = self._requested_at or time.monotonic()

    def drop(self) -> None:
        """Ask this run alone to stop, while the process goes on; no grace period begins."""
        self._is_dropped = True

    def agreed(self) -> bool:
        """Return whether to stop here; all processes call it at the same points and agree."""
        joined = stopping.joined()
        if self._is_dropped:
            return True
        if joined is None:
            if not self._agree(self._requested_at is not None):
                return False
            self._requested_at = self._requested_at or time.monotonic()  # the request came to another host
            return True
        request, rank = joined
        return request.agreed(rank)

    def requested_at(self) -> float | None:
        """Return the time of the request on the monotonic clock; None before."""
        joined = stopping.joined()
        return self._requested_at if joined is None else joined[0].requested_at

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self._requested_at is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.request()


def _wait_for_signal(reading: int) -> None:
    """Return after the wake-up pipe has had a signal that asks to stop."""
    while not set(os.read(reading, 64)) & set(stopping.SIGNALS):
        pass


@contextmanager
def parting(grace_seconds: float) -> Iterator[None]:
    """Limit the time after the block to the grace period, if child processes were asked to stop in it."""
    try:
        yield
    finally:
        if stopping.children_requested_at() is not None:
            Grace(grace_seconds, requested_at=stopping.children_requested_at).install().only_uploads_remain()


@contextmanager
def ending_in_time() -> Iterator[None]:
    """Exit at once on SystemExit if storage was abandoned in the block, without waiting for its threads."""
    try:
        yield
    except SystemExit as ending:
        if retry.is_over():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ending.code if isinstance(ending.code, int) else 1)
        raise
