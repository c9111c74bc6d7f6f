"""Recognise errors that the network, a server, the disk or the kernel made, and not this program.

Clients are known by the names of their modules and classes, so that none is imported here. Of the errors that one came
of, its causes count (`raise ... from`), and not what was being handled when it was raised: that may be a bug.
"""

import errno
import os
import re
import signal
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

REFUSED, FAILED = 2, 1
"""Exit codes: of what the user has to change first, and of what the same command may get over."""
CLIENTS = frozenset(
    {"aiohttp", "requests", "urllib3", "httpx", "httpcore", "httpx2", "httpcore2", "http", "huggingface_hub"}
    | {"google", "gcsfs", "fsspec", "s3fs", "botocore", "aiobotocore", "adlfs", "azure", "wandb", "urllib"}
)
"""Packages whose errors are about an answer from the network."""
Kind = Literal[
    "transient", "credentials", "forbidden", "missing", "proxy", "legal", "changed", "certificate", "lasting"
]


@dataclass(frozen=True)
class Fault:
    """What is wrong outside this program, what to do about it, and the exit code."""

    what: str
    remedy: str
    code: int = FAILED
    kind: Kind | None = None
    """Kind of a storage failure (storage/retry.py); None for a fault of this machine."""


LATER = "check the network and give the same command again"
LIBRARY = "SSL_CERT_FILE and REQUESTS_CA_BUNDLE name the file of its certificate"
OF_STATUS = {
    401: Fault(
        "the server wants a login, or the token is wrong or expired",
        "log in again, or set a new token (HF_TOKEN for the Hub)",
        REFUSED,
        "credentials",
    ),
    403: Fault(
        "this account has no right to it",
        "ask its owner for access (of a gated model, on its page), or choose another",
        REFUSED,
        "forbidden",
    ),
    404: Fault("there is no such file", "check the name and the revision", REFUSED, "missing"),
    407: Fault(
        "the proxy of this network wants a login",
        "set HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT, or unset it where none is needed",
        REFUSED,
        "proxy",
    ),
    412: Fault(
        "another process changed it meanwhile",
        "end the other process, and give the same command again",
        FAILED,
        "changed",
    ),
    451: Fault(
        "its server may not give it out here, for legal reasons",
        "take another copy of it, or another machine's region",
        REFUSED,
        "legal",
    ),
}
"""Faults by the status of an HTTP answer; those of `BUSY` and above 500 pass."""
BUSY = frozenset({408, 409, 423, 425, 429})
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
BROKEN_OFF = frozenset(
    {"IncompleteRead", "ContentDecodingError", "ChunkedEncodingError", "ClientPayloadError", "RemoteProtocolError"}
    | {"ProtocolError", "DecodingError", "DecodeError", "ContentLengthError", "TransferEncodingError"}
    | {"ContentEncodingError", "LocalProtocolError", "RemoteDisconnected", "BadStatusLine", "ResponseStreamingError"}
)
"""Classes of errors of an answer that ended early, or whose bytes are not what its headers say."""
OF_OUR_MAKING = frozenset({"UnsupportedProtocol", "LocationValueError", "InvalidURL", "MissingSchema"})
"""Classes of errors of a client about what it was given."""
NO_NAME = re.compile(
    r"Name or service not known|name resolution|nodename nor servname|getaddrinfo failed|Could not resolve host"
    r"|NameResolutionError|No address associated with hostname",
    re.IGNORECASE,
)
NO_TRUST = re.compile(
    r"CERTIFICATE_VERIFY_FAILED|certificate verify failed|\[SSL: \w+\]|invalid peer certificate", re.IGNORECASE
)
SIGNALLED = re.compile(r"(?:killed by|terminated with) signal:? (SIG[A-Z]+|Killed|Bus error)")
"""How torch's DataLoader and its multiprocessing write it."""
NUMBERED = re.compile(r"\(os error (\d+)\)|\[[Ee]rrno (\d+)\]")
"""How Rust's libraries (safetensors, tokenizers, hf_xet) and Arrow write the number of a system error."""
OF_SYSTEM = {
    errno.ENOSPC: ("the disk is full", "free some space, or name another place"),
    errno.EDQUOT: ("the quota of this account on the disk is used up", "free some space, or name another place"),
    errno.EFBIG: (
        "the file is larger than this disk, or `ulimit -f`, allows",
        "raise the limit, or name another place",
    ),
    errno.EROFS: ("the disk is mounted read-only", "mount it for writing, or name another place"),
    errno.EIO: ("the disk fails to read or write", "see `dmesg`; copy what is needed to another disk"),
    errno.ESTALE: ("the network file system has lost the file", "mount it again, and give the same command again"),
    **dict.fromkeys(
        (errno.ENOTCONN, errno.ESHUTDOWN),
        ("the mounted file system has lost its connection", "mount it again, and give the same command again"),
    ),
    errno.ETIMEDOUT: ("the network file system does not answer", LATER),
    errno.EMFILE: ("this process has as many files open as it may", "raise the limit: `ulimit -n 65536`"),
    errno.ENFILE: ("this machine has as many files open as it may", "raise the limit: `sysctl fs.file-max`"),
    errno.EAGAIN: (
        "this account has as many processes as it may, or memory is short",
        "raise `ulimit -u`, or end other processes",
    ),
    errno.ENOLCK: ("the file system gives no lock", "name a place on a disk of this machine"),
    **dict.fromkeys((errno.ENODEV, errno.ENXIO), ("the device is gone", "attach it again, or name another place")),
    errno.EUCLEAN: ("the file system is damaged", "check it with `fsck`, or name another place"),
}
"""Faults of a disk or of this machine by the number of the system's error, whether or not it names a file."""
OF_A_FILE = frozenset(
    {errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.EBUSY}
)
"""Error numbers that are the system's refusal where they name a file."""
OF_SIGNAL = {
    signal.SIGKILL: (
        "as the kernel does when the memory is used up (`sudo dmesg | grep -i oom`)",
        "take a machine with more memory, or do less at once",
    ),
    signal.SIGBUS: (
        "as when /dev/shm or the disk of a mapped file is full, or the file was cut short",
        "free some space (`df -h /dev/shm`), and give the same command again",
    ),
    signal.SIGILL: (
        "as when the processor lacks an instruction that a library was built for",
        "take another machine, or another build of the library",
    ),
    signal.SIGXCPU: ("as when a limit of CPU time is reached", "raise it (`ulimit -t`)"),
    signal.SIGXFSZ: ("as when a limit of the size of files is reached", "raise it (`ulimit -f`)"),
    signal.SIGTERM: ("as whoever ends a job does", "the same command goes on"),
    signal.SIGHUP: ("as when a terminal is closed", "start the command in tmux, or with nohup"),
}
"""What usually sends a signal to a child process, and what to do."""


def fault_of(error: BaseException) -> tuple[str, Fault] | None:
    """Return where something outside this program failed, and the fault; None for all other errors."""
    for each in _causes(error):
        found = _fault(each)
        if found is not None:
            return _place(each) or _place(error), found
    return None


def sentence_of(error: BaseException) -> tuple[str, int] | None:
    """Return `where; what; what to do` without a full stop, and the exit code; None for all other errors."""
    found = fault_of(error)
    if found is None:
        return None
    place, fault = found
    shown = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(".: ")
    return f"{f'{place}; ' if place else ''}{fault.what} ({shown}); {fault.remedy}", fault.code


def status_of(error: BaseException) -> int | None:
    """Return the status of the HTTP answer that an error of a client is about."""
    answer = getattr(error, "response", None)
    metadata = answer.get("ResponseMetadata", {}) if isinstance(answer, dict) else {}  # botocore's
    # one at a time: aiohttp's `code` warns, and its `status` is read before
    for holder, name in ((answer, "status_code"), (answer, "status"), (error, "status"), (error, "code")):
        value = getattr(holder, name, metadata.get("HTTPStatusCode"))
        if isinstance(value, str) and value.isdigit():
            value = int(value)
        if type(value) is int and 100 <= value < 600:
            return value
    return None


def is_of_client(error: BaseException) -> bool:
    """Return whether an error is a client's, or was raised while one read an answer (JSON that is none)."""
    return _package(type(error).__module__) in CLIENTS or _package(_innermost(error.__traceback__)) in CLIENTS


def of_status(status: int) -> Fault | None:
    """Return the fault that an HTTP status says; None below 400."""
    if status < 400:
        return None
    if status in OF_STATUS:
        return OF_STATUS[status]
    if status in BUSY or status >= 500:
        kind: Kind = "transient" if status in TRANSIENT else "lasting"
        return Fault(f"the server is busy or down (HTTP {status})", "give the same command again later", FAILED, kind)
    return Fault(
        f"the server refuses the request (HTTP {status})",
        "check the address and the network's proxy",
        REFUSED,
        "lasting",
    )


def _fault(error: BaseException) -> Fault | None:
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error)
    client = is_of_client(error)
    if client and (status := status_of(error)) is not None and (found := of_status(status)) is not None:
        return found
    is_network = client or isinstance(error, OSError)
    if isinstance(error, ssl.SSLError) or (is_network and (NO_TRUST.search(text) or "ClientSSLError" in names)):
        what = "the server cannot be trusted, or something between speaks no TLS"
        remedy = f"set this machine's clock, or make a proxy's certificate known ({LIBRARY})"
        return Fault(what, remedy, REFUSED, "certificate")
    if isinstance(error, socket.gaierror) or (is_network and NO_NAME.search(text)):
        return Fault("the name of the server cannot be looked up", LATER, FAILED, "transient")
    if client and names & BROKEN_OFF:
        return Fault("the answer broke off, or was damaged on its way", LATER, FAILED, "transient")
    if client and isinstance(error, ValueError) and names & {"JSONDecodeError", "UnicodeDecodeError"}:
        what = "the answer is not the server's but some page, as a network sends that wants a login first"
        return Fault(what, "log in to the network in a browser, and give the same command again", FAILED, "transient")
    return _of_child(error) or _of_system(error) or _of_connection(error, names, client=client)


def _of_connection(error: BaseException, names: set[str], *, client: bool) -> Fault | None:
    if isinstance(error, ValueError | TypeError) or names & OF_OUR_MAKING:
        return None
    is_broken = isinstance(error, ConnectionError | TimeoutError) and not isinstance(error, BrokenPipeError)
    words = ("Timeout", "Connect", "NetworkError", "TransportError", "MaxRetryError", "ProxyError", "Disconnected")
    if is_broken or (client and any(word in name for name in names for word in words)):
        return Fault("the server does not answer, or closes the connection", LATER, FAILED, "transient")
    return None


def _of_child(error: BaseException) -> Fault | None:
    """Return the fault of a child process that a signal ended."""
    names = {kind.__name__ for kind in type(error).__mro__}
    codes = [getattr(error, name, None) for name in ("returncode", "exit_code", "exitcode")]
    code = next((value for value in codes if type(value) is int), 0)
    found = SIGNALLED.search(str(error)) if isinstance(error, RuntimeError) else None
    if found:
        word = {"killed": "SIGKILL", "bus error": "SIGBUS"}.get(found[1].lower(), found[1].upper())
        code = -getattr(signal, word, 0)
    if code > 128 and "CalledProcessError" in names:  # as a shell tells of a signal
        code = 128 - code
    if -code in OF_SIGNAL:
        name = signal.Signals(-code).name
        cause, remedy = OF_SIGNAL[signal.Signals(-code)]
        return Fault(f"a process was ended by {name}, {cause}", remedy, FAILED)
    if "BrokenExecutor" in names:
        cause, remedy = OF_SIGNAL[signal.SIGKILL]
        return Fault(f"a worker process was ended from outside, {cause}", remedy, FAILED)
    return None


def _of_system(error: BaseException) -> Fault | None:
    """Return the fault of a disk or of this machine."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := NUMBERED.search(str(error))):
        number = int(found[1] or found[2])
    if number in OF_SYSTEM:
        what, remedy = OF_SYSTEM[number]
        return Fault(what, remedy)
    if number in OF_A_FILE and isinstance(error, OSError) and error.filename is not None:
        what = f"the system refuses it ({error.strerror})"
        return Fault(what, "mend, move or remove it, or name another place")
    return None


def _place(error: BaseException) -> str:
    """Return the file or address that an error names, without the parameters of an address; empty if none."""
    if isinstance(error, OSError) and isinstance(error.filename, str | bytes):
        name = os.fsdecode(error.filename)
        return name.partition("?")[0] if "://" in name else name
    holders: list[Any] = [error]
    for name in ("request", "response", "request_info"):
        try:  # httpx raises where an error has no request
            holders.append(getattr(error, name, None))
        except Exception:
            continue
    for holder in holders:
        for name in ("url", "real_url"):
            if getattr(holder, name, None):
                return str(getattr(holder, name)).partition("?")[0]
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        reason = getattr(each, "reason", None)  # of urllib and urllib3
        each = each.__cause__ or (reason if isinstance(reason, BaseException) else None)


def _innermost(trace: TracebackType | None) -> str:
    """Return the module of the innermost frame outside json and the codecs, which raise for whoever calls them."""
    name = ""
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        name = name if _package(module) in ("json", "codecs", "encodings", "simplejson") else module
        trace = trace.tb_next
    return name


def _package(module: str) -> str:
    return module.partition(".")[0]
