"""Retries of transient storage failures, and messages for the lasting ones.

gcsfs 2026 tries a request 6 times within about 33 s (408, 429, 5xx, broken connections, refused tokens) before its
error arrives here, so a `gs://` operation that failed in that way is not retried: 6 x 6 tries would take minutes.
Failures that gcsfs does not retry (its own timeouts, login errors) and those of other file systems are.
"""

import errno
import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.io import grace
from tpu_experiments.io.answers import NoAnswer, answered

log = logging.getLogger(__name__)
Result = TypeVar("Result")
Kind = Literal["transient", "credentials", "forbidden", "missing", "full", "lasting"]

# Google asks for growing, randomised waits after 408, 429 and 5xx (cloud.google.com/storage/docs/retry-strategy).
WAITS_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)
SILENT_TRIES_AGAIN = 1
TRANSIENT_CODES = {408, 429, 500, 502, 503, 504}
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # EFBIG: a limit on the size of files (ulimit -f)
# Errors of a mounted bucket, Google Drive or NFS that has temporarily lost its connection.
TRANSIENT_ERRNOS = {
    errno.EIO, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EPIPE,
    errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH,
}  # fmt: skip
LASTING = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
CLIENTS = ("aiohttp", "requests", "urllib3", "google", "gcsfs", "fsspec")


LOCAL_REMEDIES = {
    errno.EACCES: "this account may not write there; give it the right, or name another folder",
    errno.EPERM: "this account may not write there; give it the right, or name another folder",
    errno.EROFS: "it is mounted read-only; mount it for writing, or name another folder",
    errno.ENOTDIR: "a file lies where a folder is needed; remove it, or name another folder",
    errno.EEXIST: "a file lies where a folder is needed; remove it, or name another folder",
    errno.EISDIR: "a folder lies where a file is needed; remove it, or name another folder",
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


def is_transient(error: BaseException) -> bool:
    """Return whether the same operation may succeed later."""
    return kind_of(error) == "transient"


def kind_of(error: BaseException) -> Kind | None:
    """Classify a storage failure; None for other errors (a TypeError, say)."""
    if isinstance(error, ConfigError):  # raised by io/ranges.py for the user, from the original error
        return kind_of(error.__cause__) if error.__cause__ is not None else None
    code = getattr(error, "code", None) or getattr(error, "status", None)
    if isinstance(code, int) or (isinstance(code, str) and code.isdigit()):
        return _kind_of_code(int(code))
    if _is_refused_login(error):
        return "credentials"
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
    is_client = type(error).__module__.split(".")[0] in CLIENTS
    return "transient" if is_client or isinstance(error, OSError | EOFError | TimeoutError) else None


def retried(
    call: Callable[[], Result], *, place: str, operation: str, wait: Callable[[float], object] | None = None
) -> Result:
    """Run `call`, which does `operation` on the path or URL `place`, with retries; return its result.

    Transient failures are retried after each of `WAITS_SECONDS`. `call` must be idempotent: a request whose answer was
    lost has had its effect. A request that timed out (answers.py) is retried once, and not at all where there is a
    substitute (grace.py).

    Raises:
        Exception: the error of `call`, if it is lasting, or if there is no try or no time left.
    """
    is_local = "://" not in place or place.startswith("file://")
    num_silent = 0
    for seconds in WAITS_SECONDS:
        try:
            return call() if is_local else answered(call, place=place, operation=operation)
        except Exception as error:
            num_silent += isinstance(error, NoAnswer)
            if not _is_worth_another(error, place) or grace.is_over():
                raise
            if num_silent > (0 if grace.has_substitute() else SILENT_TRIES_AGAIN):
                raise
            log.info("%s; %s, tried again in %.0f s", place, shown(error), seconds)
            if (wait or grace.pause)(seconds * random.uniform(0.75, 1.25)) is False:
                raise
    return call() if is_local else answered(call, place=place, operation=operation)


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
    sentence = remedy.get(kind_of(error) or "", "storage refuses the operation; the log has the trace")
    if _is_of_folder(error, place):
        sentence = LOCAL_REMEDIES[error.errno]  # type: ignore[attr-defined]
    return f"{place}; {shown(error)}: {sentence}."


def is_told(error: BaseException, *, place: str) -> bool:
    """Return whether `complaint` suffices for the user; other errors need their traceback."""
    kind, is_remote = kind_of(error), "://" in place and not place.startswith("file://")
    if is_remote:
        return kind in ("credentials", "full", "transient", "forbidden", "missing")
    return kind in ("credentials", "full") or _is_of_folder(error, place)


def _is_of_folder(error: BaseException, place: str) -> bool:
    """Return whether the error is a lasting one of a local folder, of a path in it or of its parents."""
    if not isinstance(error, OSError) or error.errno not in LOCAL_REMEDIES or "://" in place.removeprefix("file://"):
        return False
    folder = os.path.abspath(place.removeprefix("file://"))
    names = [os.path.abspath(os.fsdecode(name)) for name in (error.filename, error.filename2) if isinstance(name, str)]
    return any(f"{name}/".startswith(f"{folder}/") or f"{folder}/".startswith(f"{name}/") for name in names)


@contextmanager
def told(place: str, *, full: Literal["refused", "failed"] = "refused") -> Iterator[None]:
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
        if isinstance(error, ConfigError) or not is_told(error, place=place):
            raise
        if full == "failed" and kind_of(error) == "full":
            raise StorageFailed(f"{complaint(error, place=place)} The same command goes on.") from error
        raise ConfigError(complaint(error, place=place)) from error


def shown(error: BaseException) -> str:
    """Format the type, code and first line of an error."""
    code = getattr(error, "code", None)
    kind = f"{type(error).__name__} {code}" if isinstance(code, int | str) else type(error).__name__
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return kind if not first or first.startswith("<") else f"{kind}: {first[:200]}"  # no HTML page of a proxy


def _kind_of_code(code: int) -> Kind:
    if code in TRANSIENT_CODES:
        return "transient"
    kinds: dict[int, Kind] = {401: "credentials", 403: "forbidden", 404: "missing"}
    return kinds.get(code, "lasting")


def _is_refused_login(error: BaseException) -> bool:
    """Return whether the error is a lasting login failure of google.auth, by its own `retryable`.

    A metadata server may recover; a revoked token does not.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    return "GoogleAuthError" in names and "TransportError" not in names and not getattr(error, "retryable", False)


def _is_worth_another(error: BaseException, place: str) -> bool:
    if kind_of(error) != "transient":
        return False
    if "://" not in place or place.startswith("file://"):
        return isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS
    if place.startswith(("gs://", "gcs://")):
        from gcsfs.retry import is_retriable

        return not is_retriable(error)
    return True
