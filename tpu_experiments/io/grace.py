"""How long operations on remote storage are waited for once the process was asked to stop.

A client's own tries (33 s in gcsfs) outlast the notice of a spot machine (30 s) and cannot be cut from outside. So an
operation runs in a thread of its own, which is left behind when its time is over.
"""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

PATIENCE_SECONDS = 5.0
"""After the request, for what has a substitute on the local disk; and at least so long for everything else."""
POLL_SECONDS = 0.1

Result = TypeVar("Result")

_grace: "Grace | None" = None
_own = threading.local()


class Grace:
    """Between a request to stop and the end of the process; without a request nothing is cut."""

    def __init__(self, seconds: float, *, asked_at: Callable[[], float | None]) -> None:
        """`asked_at` says when the request came, on the monotonic clock; None before."""
        self._seconds, self._asked_at = seconds, asked_at
        self._leaving_at: float | None = None

    def install(self) -> "Grace":
        """Have this process's operations follow it from now on."""
        global _grace
        _grace = self
        return self

    def leave(self) -> None:
        """The work is over: what is left is to bring to storage what is there."""
        self._leaving_at = time.monotonic()

    def ends_at(self) -> float | None:
        """When an operation that this thread waits for must have ended; None while there is no hurry."""
        asked_at = self._asked_at()
        if asked_at is None:
            return None
        if has_substitute():
            return asked_at + min(PATIENCE_SECONDS, self._seconds)
        if self._leaving_at is None:
            return None
        return max(asked_at + self._seconds, self._leaving_at + PATIENCE_SECONDS)


def leave() -> None:
    """The work of this process is over (Grace.leave), whether or not it was asked to stop."""
    if _grace is not None:
        _grace.leave()


@contextmanager
def substituted() -> Iterator[None]:
    """What this thread does inside is done in another way when it takes too long."""
    _own.has_substitute = True
    try:
        yield
    finally:
        _own.has_substitute = False


def has_substitute() -> bool:
    """Whether this thread is inside `substituted`."""
    return getattr(_own, "has_substitute", False)


def bounded(call: Callable[[], Result], *, watch: Callable[[], None] | None = None) -> Result:
    """The result of `call`, which may go on by itself when its time is over.

    Args:
        watch: called again and again while it is waited for; what it raises ends the waiting.

    Raises:
        TimeoutError: its time is over.
        BaseException: what `call` or `watch` raised.
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
    """Sleep; False as soon as there is no time left for another try."""
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0:
        if is_over():
            return False
        time.sleep(min(left, POLL_SECONDS) if _grace is not None else left)
    return not is_over()


def is_over() -> bool:
    """Whether this thread's operations have no time left."""
    ends_at = _grace.ends_at() if _grace is not None else None
    return ends_at is not None and time.monotonic() >= ends_at
