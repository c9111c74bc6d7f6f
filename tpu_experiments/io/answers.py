"""Timeouts of remote storage operations, by the time since the last byte was transferred.

A request that is accepted and never answered would block forever, and a limit on its total time would cut large
uploads. So the time since its last byte is limited: for gs://, aiohttp's client reports every chunk that it sends or
receives (aiohttp, "Client Tracing"). Transfers of other file systems cannot be observed: there the total time is
limited. A long wait is logged before it times out.
"""

import contextvars
import errno
import functools
import io
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tpu_experiments.io import grace

TOLD_SECONDS = 20.0
"""Seconds without a byte until the wait is logged."""
SILENT_SECONDS = 40.0
"""Seconds without a byte until an operation times out: GCS answers in seconds, and gcsfs waits for at most 17 s between
its own retries."""
UNSEEN_SECONDS = 600.0
"""Timeout of an operation on storage whose transfers cannot be observed."""

PIECE_BYTES = 2**18

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class NoAnswer(TimeoutError):
    """An operation timed out without progress; it may still be running in its thread."""


@dataclass
class Pulse:
    """Monotonic time at which an operation last sent or received data."""

    last: float = field(default_factory=time.monotonic)


_pulse: contextvars.ContextVar[Pulse | None] = contextvars.ContextVar("pulse", default=None)


def answered(call: Callable[[], Result], *, place: str, operation: str) -> Result:
    """Run `call`, which does `operation` on the URL `place`, with a timeout; return its result.

    Raises:
        NoAnswer: nothing was transferred for `SILENT_SECONDS`, or it took `UNSEEN_SECONDS` (see `is_seen`).
        TimeoutError: the process has to end (grace.py).
        BaseException: the error of `call`.
    """
    pulse = Pulse()
    limit = SILENT_SECONDS if is_seen(place) else UNSEEN_SECONDS
    began = time.monotonic()
    is_told = False

    def watch() -> None:
        nonlocal is_told
        silent = time.monotonic() - pulse.last
        if silent >= TOLD_SECONDS and not is_told:
            is_told = True
            log.warning(
                "waiting for %s: %s, no answer for %.0f s; given up after %.0f s", place, operation, silent, limit
            )
        if silent >= limit:
            raise NoAnswer(errno.ETIMEDOUT, f"{operation}: no answer for {silent:.0f} s")

    def work() -> Result:
        _pulse.set(pulse)
        return call()

    result = grace.bounded(work, watch=watch)
    if is_told:
        log.warning("%s has answered (%s) after %.0f s", place, operation, time.monotonic() - began)
    return result


def is_seen(place: str) -> bool:
    """Return whether transfers of operations on this URL can be observed (gs:// only)."""
    return place.startswith(("gs://", "gcs://"))


def beat() -> None:
    """Record a transfer for the operation of the current context."""
    pulse = _pulse.get()
    if pulse is not None:
        pulse.last = time.monotonic()


@functools.cache
def session_settings() -> dict[str, Any]:
    """Return arguments of aiohttp's ClientSession that report every chunk.

    The same object serves all sessions. The operation is identified by a context variable: fsspec runs its coroutines
    in the context of the calling thread.
    """
    import aiohttp  # only where there is a remote place

    class Request(aiohttp.ClientRequest):
        """Sends a body in memory in chunks of 256 KiB, where aiohttp sends it at once."""

        def update_body_from_data(self, body: Any, *arguments: Any, **options: Any) -> None:
            is_large = isinstance(body, bytes | bytearray | memoryview) and len(body) > PIECE_BYTES
            super().update_body_from_data(io.BytesIO(body) if is_large else body, *arguments, **options)

    class Response(aiohttp.ClientResponse):
        """Reports every chunk of the body, where aiohttp reports the whole."""

        async def read(self) -> bytes:
            if self._body is None:
                pieces = []
                try:
                    async for piece in self.content.iter_any():
                        beat()
                        pieces.append(piece)
                except BaseException:  # as in the base class: the connection cannot be reused
                    self.close()
                    raise
                self._body = b"".join(pieces)
            return await super().read()

    async def moved(*_: object) -> None:
        beat()

    tracing = aiohttp.TraceConfig()
    for signal in (
        tracing.on_request_start,
        tracing.on_connection_create_end,
        tracing.on_request_chunk_sent,
        tracing.on_request_end,
    ):
        signal.append(moved)
    return {"trace_configs": [tracing], "request_class": Request, "response_class": Response}
