"""Remote storage that fails or stalls: what is tried again, how long it is waited for, what a user is told.

gcsfs 2026 tries a request 6 times within about 33 s (408, 429, 5xx, broken connections, refused tokens) before its
error arrives here, so a `gs://` operation that failed in that way is not tried again: 6 x 6 tries would take minutes.
What it does not repeat (timeouts of its own, errors of the login) and every other file system is.

A request that is accepted and never answered would be waited for without end, and a limit on its whole time would cut
large uploads. So the time since its last byte counts: for gs:// aiohttp's client tells of every piece that it sends
or receives (aiohttp, "Client Tracing"). What other file systems do inside is not seen: there the whole operation
counts.

After a request to stop, a client's own tries (33 s in gcsfs) outlast the notice of a spot machine (30 s) and cannot
be cut from outside. So an operation runs in a thread of its own, which is left behind when its time is over."""

import contextvars
import errno
import functools
import io
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.escaping import for_terminal
from tpu_experiments.config.surroundings import CLIENTS, OF_STATUS, TRANSIENT, fault_of, status_of

PATIENCE_SECONDS = 5.0
"""Time after the request for operations with a substitute on the local disk, and the minimum for all others."""
POLL_SECONDS = 0.1

Result = TypeVar("Result")

_grace: "Grace | None" = None
_own = threading.local()


class Grace:
    """Deadlines between a stop request and the end of the process; without a request there are none."""

    def __init__(self, seconds: float, *, requested_at: Callable[[], float | None]) -> None:
        """Set the time from a stop request to the end of the process.

        Args:
            seconds: that time.
            requested_at: returns the monotonic time of the stop request; None before one.
        """
        self.seconds, self._requested_at = seconds, requested_at
        self._leaving_at: float | None = None

    def install(self) -> "Grace":
        """Apply these deadlines to all storage operations of this process from now on."""
        global _grace
        _grace = self
        return self

    def only_uploads_remain(self) -> None:
        """Note that the work is over and only uploads remain."""
        self._leaving_at = time.monotonic()

    @property
    def is_leaving(self) -> bool:
        """Whether the work is over."""
        return self._leaving_at is not None

    def ends_at(self) -> float | None:
        """Return the monotonic deadline of this thread's operations; None while there is none."""
        requested_at = self._requested_at()
        if requested_at is None:
            return None
        if has_substitute():
            return requested_at + min(PATIENCE_SECONDS, self.seconds)
        if self._leaving_at is None:
            return None
        return max(requested_at + self.seconds, self._leaving_at + PATIENCE_SECONDS)


def only_uploads_remain() -> None:
    """Note that the work of this process is over (Grace.only_uploads_remain), after a stop request or not."""
    if _grace is not None:
        _grace.only_uploads_remain()


@contextmanager
def with_substitute() -> Iterator[None]:
    """Mark this thread's operations inside as having a substitute, so that their deadline is earlier."""
    _own.has_substitute = True
    try:
        yield
    finally:
        _own.has_substitute = False


def has_substitute() -> bool:
    """Return whether this thread is inside `with_substitute`."""
    return getattr(_own, "has_substitute", False)


def until_deadline(call: Callable[[], Result], *, watch: Callable[[], None] | None = None) -> Result:
    """Run `call` until its deadline and return its result; after the deadline it may continue in its thread.

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


LOG_AFTER_SECONDS = 20.0
"""Seconds without a byte until the wait is logged."""
SILENT_SECONDS = 40.0
"""Seconds without a byte until an operation times out: GCS answers in seconds, and gcsfs waits for at most 17 s between
its own retries."""
UNSEEN_SECONDS = 600.0
"""Timeout of an operation on storage whose transfers cannot be observed."""

PIECE_BYTES = 2**18

log = logging.getLogger(__name__)


class NoAnswer(TimeoutError):
    """An operation timed out without progress; it may still be running in its thread."""


@dataclass
class Pulse:
    """Monotonic time at which an operation last sent or received data."""

    last: float = field(default_factory=time.monotonic)


_pulse: contextvars.ContextVar[Pulse | None] = contextvars.ContextVar("pulse", default=None)


def with_timeout(call: Callable[[], Result], *, place: str, operation: str) -> Result:
    """Run `call`, which does `operation` on the URL `place`, with a timeout; return its result.

    Raises:
        NoAnswer: nothing was transferred for `SILENT_SECONDS`, or it took `UNSEEN_SECONDS`.
        TimeoutError: the process has to end (`Grace`).
        BaseException: the error of `call`.
    """
    pulse = Pulse()
    limit = SILENT_SECONDS if can_observe_transfers(place) else UNSEEN_SECONDS
    began = time.monotonic()
    is_logged = False

    def watch() -> None:
        nonlocal is_logged
        silent = time.monotonic() - pulse.last
        if silent >= LOG_AFTER_SECONDS and not is_logged:
            is_logged = True
            log.warning(
                "waiting for %s: %s, no answer for %.0f s; it times out after %.0f s", place, operation, silent, limit
            )
        if silent >= limit:
            raise NoAnswer(errno.ETIMEDOUT, f"{operation}: no answer for {silent:.0f} s")

    def work() -> Result:
        _pulse.set(pulse)
        return call()

    result = until_deadline(work, watch=watch)
    if is_logged:
        log.warning("%s has answered (%s) after %.0f s", place, operation, time.monotonic() - began)
    return result


def can_observe_transfers(place: str) -> bool:
    """Return whether transfers of operations on this URL can be observed (gs:// only)."""
    return place.startswith(("gs://", "gcs://"))


def record_transfer() -> None:
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
                        record_transfer()
                        pieces.append(piece)
                except BaseException:  # as in the base class: the connection cannot be reused
                    self.close()
                    raise
                self._body = b"".join(pieces)
            return await super().read()

    async def moved(*_: object) -> None:
        record_transfer()

    tracing = aiohttp.TraceConfig()
    for signal in (
        tracing.on_request_start,
        tracing.on_connection_create_end,
        tracing.on_request_chunk_sent,
        tracing.on_request_end,
    ):
        signal.append(moved)
    return {"trace_configs": [tracing], "request_class": Request, "response_class": Response}


Kind = Literal[
    "transient", "credentials", "forbidden", "missing", "full", "lasting", "proxy", "legal", "changed", "certificate"
]

# Google asks for growing, randomised waits after 408, 429 and 5xx (cloud.google.com/storage/docs/retry-strategy).
WAITS_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)
SILENT_TRIES_AGAIN = 1
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # EFBIG: a limit on the size of files (ulimit -f)
# Errors of a mounted bucket, Google Drive or NFS that has temporarily lost its connection.
TRANSIENT_ERRNOS = {
    errno.EIO, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EPIPE,
    errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH,
}  # fmt: skip
LASTING = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)


LOCAL_REMEDIES = {
    errno.EACCES: "this account may not write there; give it the right, or name another folder",
    errno.EPERM: "this account may not write there; give it the right, or name another folder",
    errno.EROFS: "it is mounted read-only; mount it for writing, or name another folder",
    errno.ENOTDIR: "a file is where a folder is needed; remove it, or name another folder",
    errno.EEXIST: "a file is where a folder is needed; remove it, or name another folder",
    errno.EISDIR: "a folder is where a file is needed; remove it, or name another folder",
    errno.ENOENT: "no folder can be made there; name another one",
    errno.ENAMETOOLONG: "the name is too long; name another folder",
    errno.EINVAL: "the disk does not take this; name another folder",
    errno.ELOOP: "its symbolic links lead in a circle; mend them, or name another folder",
    errno.ENODEV: "nothing can be written there; name another folder",
    errno.ENXIO: "nothing can be written there; name another folder",
    errno.EOPNOTSUPP: "nothing can be written there; name another folder",
}
"""Advice for lasting errors of local paths."""


class StorageFailed(Exception):
    """Storage refused an operation that the run needs; the message is one sentence for the user."""

    def __str__(self) -> str:
        return for_terminal(super().__str__())


def is_transient(error: BaseException) -> bool:
    """Return whether the same operation may succeed later."""
    return kind_of(error) == "transient"


def kind_of(error: BaseException) -> Kind | None:
    """Classify a storage failure; None for other errors (a TypeError, say)."""
    if isinstance(error, ConfigError):  # raised by storage/paths.py for the user, from the original error
        return kind_of(error.__cause__) if error.__cause__ is not None else None
    code = status_of(error)
    if code is not None:
        return _kind_of_code(code)
    if _is_refused_login(error):
        return "credentials"
    found = fault_of(error)
    if found is not None and found[1].kind is not None:
        return found[1].kind
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, LASTING):
        if error.errno in FULL:
            return "full"
        return "transient" if error.errno in TRANSIENT_ERRNOS or isinstance(error, TimeoutError) else "lasting"
    if isinstance(error, FileNotFoundError):
        return "missing"
    if isinstance(error, LASTING):
        return "forbidden" if isinstance(error, PermissionError) else "lasting"
    if isinstance(error, OSError) and str(error).startswith("Forbidden"):
        return "forbidden"  # gcsfs' form of a 403
    is_client = type(error).__module__.partition(".")[0] in CLIENTS
    return "transient" if is_client or isinstance(error, OSError | EOFError | TimeoutError) else None


def with_retries(
    call: Callable[[], Result], *, place: str, operation: str, wait: Callable[[float], object] | None = None
) -> Result:
    """Run `call`, which does `operation` on the path or URL `place`, with retries; return its result.

    Transient failures are retried after each of `WAITS_SECONDS`. `call` must be idempotent: a request whose answer was
    lost has had its effect. A request that timed out (`with_timeout`) is retried once, and not at all where there is a
    substitute (`with_substitute`).

    Raises:
        Exception: the error of `call`, if it is lasting, or if there is no try or no time left.
    """
    is_local = "://" not in place or place.startswith("file://")
    num_silent = 0
    for seconds in WAITS_SECONDS:
        try:
            return call() if is_local else with_timeout(call, place=place, operation=operation)
        except Exception as error:
            num_silent += isinstance(error, NoAnswer)
            if not _may_succeed_later(error, place) or is_over():
                raise
            if num_silent > (0 if has_substitute() else SILENT_TRIES_AGAIN):
                raise
            log.info("%s; %s, retrying in %.0f s", place, shown(error), seconds)
            if (wait or pause)(seconds * random.uniform(0.75, 1.25)) is False:
                raise
    return call() if is_local else with_timeout(call, place=place, operation=operation)


def complaint(error: BaseException, *, place: str) -> str:
    """Return one sentence for the user: the place, what is wrong, what to do."""
    remedy = {
        "credentials": "the credentials are expired or missing; run `gcloud auth application-default login`, or on a "
        "VM give its service account the scope cloud-platform",
        "forbidden": "this account may not write there; give it roles/storage.objectUser on the bucket, or choose "
        "another output_dir=",
        "missing": "there is no such bucket or folder; create it (`gcloud storage buckets create`) or mend output_dir=",
        "full": "the disk is full; free some space, or choose another place",
        "transient": "storage does not answer; check the network",
    }
    found = fault_of(error)
    unknown = "storage refuses the operation; the log has the trace"
    sentence = remedy.get(kind_of(error) or "") or (f"{found[1].what}; {found[1].remedy}" if found else unknown)
    if _is_of_folder(error, place):
        sentence = LOCAL_REMEDIES[error.errno]  # type: ignore[attr-defined]
    return f"{place}; {shown(error)}: {sentence}."


def is_explained(error: BaseException, *, place: str) -> bool:
    """Return whether `complaint` suffices for the user; other errors need their traceback."""
    kind, is_remote = kind_of(error), "://" in place and not place.startswith("file://")
    if is_remote:
        return kind not in (None, "lasting")
    return kind in ("credentials", "full") or _is_of_folder(error, place)


def _is_of_folder(error: BaseException, place: str) -> bool:
    """Return whether the error is a lasting one of a local folder, of a path in it or of its parents."""
    if not isinstance(error, OSError) or error.errno not in LOCAL_REMEDIES or "://" in place.removeprefix("file://"):
        return False
    folder = os.path.abspath(place.removeprefix("file://"))
    names = [os.path.abspath(os.fsdecode(name)) for name in (error.filename, error.filename2) if isinstance(name, str)]
    return any(f"{name}/".startswith(f"{folder}/") or f"{folder}/".startswith(f"{name}/") for name in names)


@contextmanager
def explain_storage_errors(place: str, *, full: Literal["refused", "failed"] = "refused") -> Iterator[None]:
    """Turn a storage failure at `place` inside the context into an error with one sentence for the user.

    Args:
        full: how a full disk counts: `refused`, it has to be mended before anything is done; `failed`, it filled during
            the work.

    Raises:
        ConfigError: storage refused, or does not answer.
        StorageFailed: the disk is full, and `full` is `failed`.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigError) or not is_explained(error, place=place):
            raise
        if full == "failed" and kind_of(error) == "full":
            raise StorageFailed(f"{complaint(error, place=place)} The same command resumes.") from error
        raise ConfigError(complaint(error, place=place)) from error


def shown(error: BaseException) -> str:
    """Format the type, code and first line of an error."""
    code = status_of(error)
    kind = f"{type(error).__name__} {code}" if code is not None else type(error).__name__
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return kind if not first or first.startswith("<") else f"{kind}: {first[:200]}"  # no HTML page of a proxy


def _kind_of_code(code: int) -> Kind:
    if code in TRANSIENT:
        return "transient"
    fault = OF_STATUS.get(code)
    return (fault.kind if fault is not None else None) or "lasting"


def _is_refused_login(error: BaseException) -> bool:
    """Return whether the error is a lasting login failure: of google.auth by its own `retryable`, of S3 by its class.

    A metadata server may recover; a revoked token does not.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"NoCredentialsError", "PartialCredentialsError"}:  # botocore's
        return True
    return "GoogleAuthError" in names and "TransportError" not in names and not getattr(error, "retryable", False)


def _may_succeed_later(error: BaseException, place: str) -> bool:
    if kind_of(error) != "transient":
        return False
    if "://" not in place or place.startswith("file://"):
        return isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS
    if place.startswith(("gs://", "gcs://")):
        from gcsfs.retry import is_retriable

        return not is_retriable(error)
    return True
