"""Deadlines of remote storage operations after a stop request.

A client's own retries (33 s in gcsfs) outlast the notice of a spot machine (30 s) and cannot be interrupted from
outside. So each operation runs in its own thread, which is abandoned at its deadline.
"""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

PATIENCE_SECONDS = 5.0
"""Time after the request for operations with a substitute on the local disk, and the minimum for all others."""
POLL_SECONDS = 0.1

Result = TypeVar("Result")

_grace: "Grace | None" = None
_own = threading.local()


class Grace:
    """Deadlines between a stop request and the end of the process; without a request there are none."""

    def __init__(self, seconds: float, *, asked_at: Callable[[], float | None]) -> None:
        """Set the time from a stop request to the end of the process.

        Args:
            seconds: that time.
            asked_at: returns the monotonic time of the stop request; None before one.
        """
        self._seconds, self._asked_at = seconds, asked_at
        self._leaving_at: float | None = None

    def install(self) -> "Grace":
        """Apply these deadlines to all storage operations of this process from now on."""
        global _grace
        _grace = self
        return self

    def leave(self) -> None:
        """Note that the work is over and only uploads remain."""
        self._leaving_at = time.monotonic()

    def ends_at(self) -> float | None:
        """Return the monotonic deadline of this thread's operations; None while there is none."""
        asked_at = self._asked_at()
        if asked_at is None:
            return None
        if has_substitute():
            return asked_at + min(PATIENCE_SECONDS, self._seconds)
        if self._leaving_at is None:
            return None
        return max(asked_at + self._seconds, self._leaving_at + PATIENCE_SECONDS)


def leave() -> None:
    """Note that the work of this process is over (Grace.leave), after a stop request or not."""
    if _grace is not None:
        _grace.leave()


@contextmanager
def substituted() -> Iterator[None]:
    """Mark this thread's operations inside as having a substitute, so that their deadline is earlier."""
    _own.has_substitute = True
    try:
        yield
    finally:
        _own.has_substitute = False


def has_substitute() -> bool:
    """Return whether this thread is inside `substituted`."""
    return getattr(_own, "has_substitute", False)


def bounded(call: Callable[[], Result], *, watch: Callable[[], None] | None = None) -> Result:
    """Run `call` until its deadline and return its result; after the deadline it may go on in its thread.

    Args:
        watch: polled while `call` runs; an exception of it ends the wait.

    Raises:
        TimeoutError: the deadline has passed.
        BaseException: the error of `call` or `watch`.
    """
    if _grace is None and watch is None:
        return call()
    if is_over():
        raise TimeoutError(errno.ETIMEDOUT, "not tried: the process has to end")
    results: list[Result] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="storage", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_SECONDS)
        if thread.is_alive() and is_over():
            raise TimeoutError(errno.ETIMEDOUT, "no answer, and the process has to end")
        if thread.is_alive() and watch is not None:
            watch()
    if errors:
        raise errors[0]
    return results[0]


def pause(seconds: float) -> bool:
    """Sleep; return False as soon as the deadline leaves no time for another try."""
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0:
        if is_over():
            return False
        time.sleep(min(left, POLL_SECONDS) if _grace is not None else left)
    return not is_over()


def is_over() -> bool:
    """Return whether the deadline of this thread's operations has passed."""
    ends_at = _grace.ends_at() if _grace is not None else None
    return ends_at is not None and time.monotonic() >= ends_at
