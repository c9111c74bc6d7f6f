"""Waiting for remote storage: what an operation waits for is told, and one in which nothing moves any more is given up.

A request that is accepted and never answered would be waited for without end, and a limit on its whole time would cut
large uploads. So the time since its last byte counts: for gs:// aiohttp's client tells of every piece that it sends or
receives (aiohttp, "Client Tracing"). What other file systems do inside is not seen: there the whole operation counts.
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
"""Without a byte, after which the log says what is waited for."""
SILENT_SECONDS = 40.0
"""Without a byte, after which an operation is given up: GCS answers in seconds, and gcsfs pauses for 17 s at most
between tries of its own."""
UNSEEN_SECONDS = 600.0
"""For an operation on storage whose bytes are not seen."""

PIECE_BYTES = 2**18

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class NoAnswer(TimeoutError):
    """An operation in which nothing moved any more was given up; it may go on by itself."""


@dataclass
class Pulse:
    """When an operation last sent or received something, on the monotonic clock."""

    last: float = field(default_factory=time.monotonic)


_pulse: contextvars.ContextVar[Pulse | None] = contextvars.ContextVar("pulse", default=None)


def answered(call: Callable[[], Result], *, place: str, operation: str) -> Result:
    """The result of `call`, which does `operation` on the URL `place`.

    Raises:
        NoAnswer: nothing moved for `SILENT_SECONDS`.
        TimeoutError: the process has to end (grace.py).
        BaseException: what `call` raised.
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
    """Whether the bytes that operations on this URL move are seen."""
    return place.startswith(("gs://", "gcs://"))


def beat() -> None:
    """Note that something moved for the operation that this code runs for."""
    pulse = _pulse.get()
    if pulse is not None:
        pulse.last = time.monotonic()


@functools.cache
def session_settings() -> dict[str, Any]:
    """Arguments of aiohttp's ClientSession that make it tell of every piece; the same object for all sessions.

    The operation is known by a context variable: fsspec starts its coroutines in the context of the calling thread.
    """
    import aiohttp  # only where there is a remote place

    class Request(aiohttp.ClientRequest):
        """Sends what lies in memory piece by piece (256 KiB), where aiohttp sends it as one."""

        def update_body_from_data(self, body: Any, *arguments: Any, **options: Any) -> None:
            is_large = isinstance(body, bytes | bytearray | memoryview) and len(body) > PIECE_BYTES
            super().update_body_from_data(io.BytesIO(body) if is_large else body, *arguments, **options)

    class Response(aiohttp.ClientResponse):
        """Tells of every piece of the body, where aiohttp tells of the whole."""

        async def read(self) -> bytes:
            if self._body is None:
                pieces = []
                try:
                    async for piece in self.content.iter_any():
                        beat()
                        pieces.append(piece)
                except BaseException:  # as in the class itself: the connection is of no use any more
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
