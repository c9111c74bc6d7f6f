"""The lease of a run folder: one writer at a time, who renews it; any process may take an expired one.

`<run>/.lease.json` has the owner and the number of renewals. The clocks of two machines are never compared: the age of
a lease is the difference of two modification times from the storage, its own and that of a file written now. Storage
without such times is polled for as long as a lease is valid. On the owner's machine a dead process is detected at once.
A lease is created only where there is none: on a local disk under a lock on the folder, on gs:// with
`ifGenerationMatch`. It is read back after a pause, which decides between two writers on storage that has neither.
"""

import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.storage import paths
from tpu_experiments.storage.process import boot_seconds, started_ticks
from tpu_experiments.storage.retry import explain_storage_errors, shown, with_timeout

NAME = ".lease.json"
PROBE = ".time-"
"""Beginning of the name of a file that is written for the storage's time."""
RENEW_SECONDS = 20.0
VALID_SECONDS = 120.0  # six renewals: a run keeps its lease while a bucket is out of reach for a minute
LOCK_SECONDS = 5.0
PAUSE_SECONDS = 1.0  # of two processes that create at the same moment, both have written before either reads back

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owner:
    """Content of a lease."""

    id: str
    host: str
    machine: str
    """Boot id and pid namespace: owners with equal values share one space of process ids."""
    pid: int
    pid_ticks: int
    """Start of the process in clock ticks since the boot: its id may have been reused since."""
    started: str
    renewals: int = 0

    @classmethod
    def me(cls) -> "Owner":
        """Return the owner record of this process."""
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return cls(uuid.uuid4().hex, socket.gethostname(), _machine(), os.getpid(), started_ticks(os.getpid()), started)

    @property
    def is_dead(self) -> bool:
        """Whether it was a process of this machine that has ended."""
        if self.machine != _machine():
            return False
        try:
            return started_ticks(self.pid) != self.pid_ticks
        except ProcessLookupError:
            return True


class Lease:
    """A lease held by this process from `acquire` to `release`; `is_lost` once another has taken it."""

    def __init__(self, folder: str, *, name: str, on_lost: Callable[[], object], renew_seconds: float | None = None):
        self.path = paths.join(folder, NAME)
        self.is_lost = False
        self._on_lost = on_lost
        self._folder, self._name = folder, name
        self._owner = Owner.me()
        self._stop = threading.Event()
        self._writing = threading.Lock()
        self._renewed_at = boot_seconds()
        self._renew_seconds = RENEW_SECONDS if renew_seconds is None else renew_seconds
        self._thread = threading.Thread(target=self._renew_until_stopped, name="lease", daemon=True)

    def acquire(self) -> "Lease":
        """Take the lease and start the thread that renews it.

        Raises:
            ConfigError: another process holds it, or storage refuses.
        """
        with explain_storage_errors(self._folder):
            self._acquire()
        self._thread.start()
        return self

    def _acquire(self) -> None:
        paths.make_dirs(self._folder)
        with _locked(self._folder):
            _refuse_if_held(self._folder, name=self._name, clear=True)
            # FileExistsError: created by another a moment ago, or by this process in a try whose answer was lost.
            with contextlib.suppress(FileExistsError):
                _create(self.path, _text(self._owner))
        if paths.is_remote(self._folder):
            time.sleep(PAUSE_SECONDS)
        holder = read(self._folder)
        if holder is None or holder.id != self._owner.id:
            raise ConfigError(_refusal(self._name, holder, seconds=VALID_SECONDS))
        _remove_leftovers(self._folder)

    def release(self) -> None:
        """Remove the lease if this process still owns it; a second call does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        with self._writing, contextlib.suppress(Exception):  # if storage is out of reach, the lease expires by itself
            holder = read(self._folder)
            if holder is not None and holder.id == self._owner.id:
                _remove_leftovers(self._folder)
                paths.remove_tree(self.path)

    def _renew_until_stopped(self) -> None:
        while not self._stop.wait(self._renew_seconds):
            self.check()
            if self.is_lost:
                return

    def check(self) -> None:
        """Renew the lease; call `on_lost` if another process has taken it."""
        try:
            self._renew()
        except Exception as error:  # an outage: the lease ages, and the next try may still renew it
            log.info("the lease of %s could not be renewed: %s", self._folder, shown(error))
        if self.is_lost:
            self._on_lost()

    def _renew(self) -> None:
        if not self._writing.acquire(timeout=LOCK_SECONDS):
            return  # a signal interrupted a renewal in this thread; the lease's thread renews soon
        try:
            if self._stop.is_set():
                return
            holder = read(self._folder)
            silent = boot_seconds() - self._renewed_at
            if holder is None and silent > VALID_SECONDS:
                log.error(
                    "name=%s was not renewed for %.0f s (was this process stopped?), and its lease is gone: others "
                    "may have written the run; this process stops writing to it, and the same command resumes it",
                    self._name,
                    silent,
                )
                self.is_lost = True
                return
            if holder is None or holder.id == self._owner.id:
                self._owner = replace(self._owner, renewals=self._owner.renewals + 1)
                paths.write_text_atomic(self.path, _text(self._owner))
                self._renewed_at = boot_seconds()
                return
            if not self.is_lost:
                log.error(
                    "name=%s was taken over by process %d on %s; this process stops writing to it",
                    self._name,
                    holder.pid,
                    holder.host,
                )
            self.is_lost = True
        finally:
            self._writing.release()


@contextlib.contextmanager
def hold(folder: str, *, name: str, on_lost: Callable[[], object]) -> Iterator[None]:
    """Hold the lease of a run folder; on a slice of several hosts, only the first holds it for all.

    Raises:
        ConfigError: another process holds it.
    """
    if os.environ.get("TPU_WORKER_ID", "0") not in ("", "0"):
        yield
        return
    lease = Lease(folder, name=name, on_lost=on_lost).acquire()
    try:
        with _checking_after_resume(lease):
            yield
    finally:
        lease.release()


@contextlib.contextmanager
def _checking_after_resume(lease: Lease) -> Iterator[None]:
    """Check the lease after the process was stopped (SIGSTOP, a suspended machine), before it continues.

    Others may have taken it meanwhile, and even have finished the run. Python runs the handler in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGCONT, lambda *_: lease.check())
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, former)


def refuse_if_held(folder: str, *, name: str) -> None:
    """Check that no other process holds the run; writes at most a temporary file for the storage's time.

    Raises:
        ConfigError: another process holds the run.
    """
    _refuse_if_held(folder, name=name, clear=False)


def read(folder: str) -> Owner | None:
    """Read the owner of the run folder; None without a lease. A malformed one is logged and ignored."""
    try:
        return Owner(**json.loads(paths.read_text(paths.join(folder, NAME))))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, RecursionError) as error:
        log.warning("%s is not a valid lease (%s): ignored", paths.join(folder, NAME), error)
        return None


def _refuse_if_held(folder: str, *, name: str, clear: bool) -> None:
    """Raise for a valid lease; with `clear`, remove an expired one."""
    path = paths.join(folder, NAME)
    before = _generation(path)
    holder = read(folder)
    if holder is None and not paths.exists(path):
        return
    if holder is not None and not holder.is_dead:
        left = VALID_SECONDS - _age_seconds(folder, holder)
        if left > 0:
            raise ConfigError(_refusal(name, holder, seconds=left))
    if clear:
        if holder is not None:
            log.warning(
                "took over the lease of name=%s from process %d on %s, which has ended", name, holder.pid, holder.host
            )
        _remove(path, generation=before)


def _refusal(name: str, holder: Owner | None, *, seconds: float) -> str:
    who = "another process" if holder is None else f"process {holder.pid} on {holder.host} (since {holder.started})"
    return (
        f"name={name}; {who} is writing this run; stop it, choose another name=, or, if it was killed, wait "
        f"{max(seconds, 1):.0f} s: its lease expires then."
    )


def _age_seconds(folder: str, holder: Owner) -> float:
    """Return the seconds since the last renewal by the storage's clock; without one, poll the lease."""
    path = paths.join(folder, NAME)
    probe = paths.join(folder, f"{PROBE}{uuid.uuid4().hex[:8]}")
    paths.write_text_atomic(probe, "")
    try:
        now = paths.modified_seconds(probe)
    except FileNotFoundError:
        return 0.0  # its holder lives: it has just removed the probe as a leftover
    finally:
        paths.remove_tree(probe)
    try:
        then = paths.modified_seconds(path)
    except FileNotFoundError:
        return VALID_SECONDS  # released meanwhile
    return now - then if now is not None and then is not None else _poll_age(folder, holder)


def _remove_leftovers(folder: str) -> None:
    """Remove what processes that were killed left in a run folder under temporary names; its lease is held."""
    paths.remove_leftovers(folder)
    for name in paths.list_names(folder):
        if name.startswith(PROBE):
            paths.remove_tree(paths.join(folder, name))


def _poll_age(folder: str, holder: Owner) -> float:
    """Poll the lease: return 0 as soon as it is renewed, `VALID_SECONDS` if it never is or is removed."""
    for _ in range(round(VALID_SECONDS)):
        time.sleep(1.0)
        latest = read(folder)
        if latest is None:
            break
        if latest != holder:
            return 0.0
    return VALID_SECONDS


def _text(owner: Owner) -> str:
    return json.dumps(asdict(owner), indent=1) + "\n"


def _create(path: str, text: str) -> None:
    """Create the file, in a bucket only if there is none; local callers hold the folder's lock.

    Raises:
        FileExistsError: the bucket has one.
    """
    if path.startswith(("gs://", "gcs://")):

        def create() -> None:
            filesystem, key = paths.filesystem_of(path)
            filesystem.pipe_file(key, text.encode(), mode="create")

        with_timeout(create, place=path, operation="write")
    else:
        paths.write_text_atomic(path, text)


def _generation(path: str) -> str | None:
    """Return the generation number of an object in a bucket; None on other storage."""
    if not path.startswith(("gs://", "gcs://")):
        return None
    try:
        return str(paths.remote_info(path)["generation"])
    except (FileNotFoundError, KeyError):
        return None


def _remove(path: str, *, generation: str | None) -> None:
    """Remove the file; in a bucket only if it is still of this generation."""
    if generation is None:
        paths.remove_tree(path)
        return

    def remove() -> None:
        filesystem, key = paths.filesystem_of(path)
        bucket, name, _ = filesystem.split_path(key)
        with contextlib.suppress(FileNotFoundError, FileExistsError):  # 404 and 412: another process was faster
            filesystem.call("DELETE", "b/{}/o/{}", bucket, name, ifGenerationMatch=generation)
        filesystem.invalidate_cache()

    with_timeout(remove, place=path, operation="remove")


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Lock a local folder; does nothing where locks are not supported (a bucket, some mounts)."""
    if paths.is_remote(folder):
        yield
        return
    descriptor = os.open(folder.removeprefix("file://"), os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _machine() -> str:
    try:
        boot: Any = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{socket.gethostname()}/{uuid.getnode()}"
