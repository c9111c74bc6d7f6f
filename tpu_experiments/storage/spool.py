"""Files on the local disk whose place is remote: growing records (`Mirror`), checkpoints in an outage (`Spool`).

Object stores cannot append (gcsfs opens "a" as overwrite), so a mirror's local copy is uploaded whole every
`UPLOAD_SECONDS` from one background thread, before a checkpoint counts (`upload_all`), and at `close`. Where the
place is local there is no copy: it is written directly. What cannot be uploaded in the end is kept in the
folder of `set_spill_folder`.

`Spool.save` writes to the place a checkpoint belongs to. When that fails as storage fails (storage/retry.py), it
writes to `<cache>/spool/<key>` instead, says so once, and a thread tries the place again from then on: the newest
checkpoint first, its commit marker last. The next start of the run on this machine delivers what a dead process left.
The run's records go the same way, before the marker: a run that resumes from a checkpoint does not write the records
before it again. The save of a request to stop goes here first and to its place from here.

A full disk is another matter: what retention may remove is removed at once and the save repeated; if that is not
enough the run continues without this checkpoint, and `LIMIT` such saves in a row end it."""

import contextlib
import hashlib
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from tpu_experiments.config.folders import cache_folder
from tpu_experiments.storage import paths, retry
from tpu_experiments.storage.retry import StorageFailed, complaint, kind_of, shown

UPLOAD_SECONDS = 30.0  # event files and logs are kilobytes; GCS allows one update a second per object

log = logging.getLogger(__name__)
_open: list["Mirror"] = []
"""Open mirrors of this process with remote targets."""
_spill_folders: dict[str, Path] = {}
"""Folder for what cannot be uploaded at the end of the process, by run."""


class Mirror:
    """A file or folder to write at `local`; call `upload_if_due` after each flush and `close` at the end."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._thread: threading.Thread | None = None
        self._uploading = threading.Lock()  # else an older upload could overwrite a newer one
        self._uploaded: dict[Path, tuple[int, int, int]] = {}
        self._last_upload = time.monotonic()
        self._failed_since: float | None = None
        if paths.is_remote(target):
            self._temporary = tempfile.TemporaryDirectory(prefix="tpu_experiments_")
            self.local = Path(self._temporary.name) / target.rpartition("/")[2]
            _open.append(self)
        else:
            self.local = Path(target.removeprefix("file://"))

    @classmethod
    def of_file(cls, target: str) -> "Mirror":
        """Mirror a file; its present content is downloaded, to be appended to."""
        held = paths.read_bytes(target) if paths.is_remote(target) and paths.exists(target) else None
        mirror = cls(target)
        if held is not None:
            mirror.local.write_bytes(held)
        return mirror

    @classmethod
    def of_folder(cls, target: str) -> "Mirror":
        """Mirror a folder for new files; those of earlier processes are not downloaded."""
        mirror = cls(target)
        mirror.local.mkdir(parents=True, exist_ok=True)
        return mirror

    def is_below(self, run: str) -> bool:
        """Return whether the target is in the folder `run`."""
        return self._target.startswith(run.rstrip("/") + "/")

    def upload_if_due(self) -> None:
        """Start an upload if the last one is done and `UPLOAD_SECONDS` old; does not block."""
        running = self._thread is not None and self._thread.is_alive()
        if self._temporary is None or running:
            return
        if time.monotonic() - self._last_upload < UPLOAD_SECONDS:
            return
        self._last_upload = time.monotonic()
        self._thread = threading.Thread(target=self._try_upload, name="mirror", daemon=True)
        self._thread.start()

    def upload(self) -> None:
        """Upload everything written before the call, and block until that is done; any thread may call it.

        Raises:
            Exception: storage refused.
        """
        if self._temporary is not None:
            self._upload()

    def copy(self) -> Path | None:
        """Copy the local files to the spill folder and return it; None if none is set for this run."""
        spill = self._spill()
        if spill is None:
            return None
        for file in self._files():
            kept = self._spill_path(file, *spill)
            kept.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(file, kept)
        return spill[1]

    def close(self) -> None:
        """Upload the local copy a last time and remove it.

        Raises:
            Exception: the last upload failed; the local copy is kept, and its path is logged.
        """
        if self._temporary is None:
            return
        if self._thread is not None:
            self._thread.join()
        try:
            self._upload()
        except Exception:
            log.error("the last upload to %s failed; its data is in %s", self._target, self._keep_local_copy())
            raise
        finally:
            _open.remove(self)
            self._temporary.cleanup()
            self._temporary = None

    def _keep_local_copy(self) -> Path:
        """Keep the local copy after a failed last upload; return its path."""
        folder = self.copy()
        if folder is not None:
            return folder
        kept = Path(tempfile.mkdtemp(prefix="tpu_experiments_kept_")) / self.local.name
        self.local.rename(kept)
        return kept

    def _try_upload(self) -> None:
        """Upload in the background: the next upload repeats a failed one, and an outage is logged once."""
        try:
            self._upload()
        except Exception as error:
            if self._failed_since is None:
                self._failed_since = time.monotonic()
                log.warning("upload to %s failed and will be retried: %s", self._target, shown(error))
            return
        if self._failed_since is not None:
            minutes = (time.monotonic() - self._failed_since) / 60
            log.warning("upload to %s succeeded after %.1f min", self._target, minutes)
            self._failed_since = None

    def _upload(self) -> None:
        """Upload every changed file; one that is removed meanwhile is skipped."""
        spill = self._spill()
        with self._uploading:
            for file in self._files():
                try:
                    state, data = _state(file), file.read_bytes()
                except FileNotFoundError:
                    continue
                if self._uploaded.get(file) != state:
                    paths.write_bytes_atomic(self._place(file), data)
                    self._uploaded[file] = state
                if spill is not None:
                    # The spilled copy is no newer than what was just uploaded.
                    self._spill_path(file, *spill).unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        if self.local.is_file():
            return [self.local]
        return sorted(file for file in self.local.rglob("*") if file.is_file() and not file.is_symlink())

    def _place(self, file: Path) -> str:
        return paths.join(self._target, *file.relative_to(self.local).parts) if file != self.local else self._target

    def _spill(self) -> tuple[str, Path] | None:
        """Return the run that the target is below and its spill folder; None where there is none."""
        return next((each for each in _spill_folders.items() if self.is_below(each[0])), None)

    def _spill_path(self, file: Path, run: str, folder: Path) -> Path:
        return folder / self._place(file).removeprefix(run)


def _state(file: Path) -> tuple[int, int, int]:
    """Return a fingerprint that changes once the file has grown or was replaced."""
    stat = file.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def set_spill_folder(folder: Path, *, run: str) -> None:
    """Keep files below `run` that cannot be uploaded at the end of the process in `folder` from now on."""
    _spill_folders[run.rstrip("/") + "/"] = folder


def upload_all(*, run: str) -> None:
    """Upload every record below the folder `run` that was written before the call.

    Raises:
        Exception: storage refused one.
    """
    for mirror in list(_open):
        if mirror.is_below(run):
            mirror.upload()


def copy_all() -> None:
    """Copy what `upload_all` would upload to the folders set by `set_spill_folder`, for a restart on this machine."""
    for mirror in list(_open):
        mirror.copy()


RECORDS = "records"
LIMIT = 10
"""Saves in a row that may fail on a full disk before the run stops."""
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 15.0, 300.0

Result = TypeVar("Result")
WriteCheckpoint = Callable[[str], Result]
"""Writes one checkpoint as a folder below the folder that it is given; may be called again with another folder."""
FreeSpace = Callable[[], object]
"""Removes the checkpoints that retention does not need."""
First = Literal["target", "spool"]
"""Where a checkpoint is written first."""


class Spool:
    """Writer of a run's checkpoints with a local spool; `save` may be called from one thread at a time."""

    def __init__(self, target: str, *, key: str, marker: str) -> None:
        """Set the folders.

        Args:
            target: folder of the checkpoints, each a folder below it.
            key: identifies the run among the spools of this machine.
            marker: name of the file whose presence makes a checkpoint complete.
        """
        self.target, self.local = target, Path(cache_folder("spool"), key)
        self._marker, self._run = marker, target.rpartition("/")[0]
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._unreachable_since: float | None = None
        self._num_full = 0

    def upload_records(self, folder: str) -> None:
        """Upload the run's records, or copy them to the spool; call it before a checkpoint is committed there.

        Args:
            folder: the target or the local spool.

        Raises:
            Exception: the target is out of reach.
        """
        if folder == self.target:
            upload_all(run=self._run)
        else:
            copy_all()

    @property
    def records(self) -> Path:
        """Folder of records that could not be uploaded, with the paths that they have in the run folder."""
        return self.local / RECORDS

    @property
    def is_unreachable(self) -> bool:
        """Whether the target is out of reach, so that checkpoints are spilled to the local disk."""
        return self._unreachable_since is not None

    def save(
        self, write: WriteCheckpoint[Result], *, free_space: FreeSpace | None = None, first: First = "target"
    ) -> Result | None:
        """Write a checkpoint to the target, or to the local spool while the target is out of reach.

        If the target's disk is full, incomplete checkpoints are removed, `free_space` is called, and `write` is called
        again.

        Args:
            write: writes the checkpoint.
            free_space: makes room on a full disk.
            first: `spool` writes to the local spool if the target is remote and the local disk has room; `close` then
                uploads it.

        Returns:
            The result of `write`; None if the disk was too full for this checkpoint.

        Raises:
            StorageFailed: the disk was full `LIMIT` times in a row.
            Exception: `write` failed for another reason than storage.
        """
        if first == "spool" and paths.is_remote(self.target):
            try:
                return self._write_locally(write)
            except OSError as error:
                log.warning("%s; %s: the checkpoint is written to %s only", self.local, shown(error), self.target)
        if not self.is_unreachable:
            try:
                return self._write_to_target(write, free_space)
            except Exception as error:
                if not self._is_outage(error) and kind_of(error) != "full":
                    raise
                if kind_of(error) == "full":
                    self._skip_checkpoint(error)
                    return None
                self._begin_outage(error)
        try:
            self._unreachable_since = self._unreachable_since or time.monotonic()
            result = self._write_locally(write)
        except OSError as error:
            self._skip_checkpoint(error)
            return None
        self._start_delivery()
        return result

    def deliver(self) -> int:
        """Upload spilled records and checkpoints, the newest first; return the number of checkpoints.

        Raises:
            Exception: the target is still out of reach.
        """
        arrived = 0
        upload_all(run=self._run)
        self._deliver_records()
        while True:
            with self._lock:  # a concurrent save may spill another one
                names = self._names()
                if not names:
                    if not self._spilled_records():
                        shutil.rmtree(self.local, ignore_errors=True)
                    self._end_outage(arrived)
                    return arrived
            arrived += self._upload(names[-1])

    def close(self) -> None:
        """Upload what is left; a second call does nothing.

        Raises:
            StorageFailed: the target is still out of reach; the message has the local folder.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        if not self._names() and not self._spilled_records():
            return
        try:
            self.deliver()
        except Exception as error:
            raise StorageFailed(
                f"{complaint(error, place=self.target)} {self._spilled_text()}; the same command on this machine "
                "delivers them."
            ) from error

    def _write_locally(self, write: WriteCheckpoint[Result]) -> Result:
        with self._lock:
            self.local.mkdir(parents=True, exist_ok=True)
            return write(str(self.local))

    def _is_outage(self, error: Exception) -> bool:
        """Return whether the target may be back later, unlike a local disk with a lasting failure."""
        kind = kind_of(error)
        return kind is not None and (kind == "transient" or paths.is_remote(self.target))

    def _write_to_target(self, write: WriteCheckpoint[Result], free_space: FreeSpace | None) -> Result:
        try:
            with retry.with_substitute():
                result = write(self.target)
        except Exception as error:
            if kind_of(error) != "full":
                raise
            log.warning("%s; %s: removing checkpoints that retention does not keep", self.target, shown(error))
            self._remove_incomplete()
            if free_space is not None:
                free_space()
            result = write(self.target)
        self._num_full = 0
        return result

    def _remove_incomplete(self) -> None:
        """Remove checkpoints without a marker, of any save; this process is the only writer."""
        for name in paths.list_names(self.target):
            if name.startswith("step_") and not paths.exists(paths.join(self.target, name, self._marker)):
                paths.remove_tree(paths.join(self.target, name))

    def _skip_checkpoint(self, error: Exception) -> None:
        """Count and log a save that did not fit; raise StorageFailed after LIMIT in a row."""
        self._num_full += 1
        sentence = f"{complaint(error, place=self.target)} This checkpoint is skipped ({_free_text(self.target)})"
        if self._num_full >= LIMIT:
            raise StorageFailed(f"{sentence}; stopped after {LIMIT} in a row.") from error
        log.warning("%s; training continues, and stops after %d in a row.", sentence, LIMIT)

    def _begin_outage(self, error: Exception) -> None:
        self._unreachable_since = time.monotonic()
        log.warning(
            "%s Training continues; checkpoints are spilled to %s (%s) and uploaded once storage answers.",
            complaint(error, place=self.target),
            self.local,
            _free_text(str(self.local)),
        )

    def _end_outage(self, arrived: int) -> None:
        if self._unreachable_since is not None:
            minutes = (time.monotonic() - self._unreachable_since) / 60
            log.warning("%s is reachable again after %.1f min; %d checkpoints uploaded.", self.target, minutes, arrived)
        self._unreachable_since = None

    def _start_delivery(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._deliver_until_done, name="spool", daemon=True)
            self._thread.start()

    def _deliver_until_done(self) -> None:
        seconds = FIRST_WAIT_SECONDS
        while (self.is_unreachable or self._names()) and not self._closed.wait(seconds):
            try:
                self.deliver()
            except Exception as error:  # of any type: the checkpoints stay in the spool
                log.info("%s is still unreachable: %s; %s", self.target, shown(error), self._spilled_text())
            seconds = min(2 * seconds, LONGEST_WAIT_SECONDS)

    def _names(self) -> list[str]:
        """Return the names of the complete checkpoints in the spool, oldest first."""
        names = paths.list_names(str(self.local))
        return [
            name
            for name in names
            if (self.local / name / self._marker).is_file() and not (self.local / name).is_symlink()
        ]

    def _upload(self, name: str) -> bool:
        """Upload a checkpoint, its marker last; return False if retention has removed it meanwhile."""
        source, place = self.local / name, paths.join(self.target, name)
        if not paths.exists(paths.join(place, self._marker)):
            paths.remove_tree(place)
            paths.make_dirs(place)
            files = sorted(file for file in source.rglob("*") if file.is_file() and file.name != self._marker)
            for file in [*files, source / self._marker]:
                if file.name == self._marker:
                    upload_all(run=self._run)
                try:
                    paths.copy_file(str(file), paths.join(place, *file.relative_to(source).parts))
                except FileNotFoundError:
                    if file.exists():
                        raise
                    return False
        shutil.rmtree(source, ignore_errors=True)
        return True

    def _spilled_records(self) -> list[Path]:
        return sorted(file for file in self.records.rglob("*") if file.is_file() and not file.is_symlink())

    def _deliver_records(self) -> None:
        """Upload spilled records.

        One that grows is uploaded only if the target file is a prefix of it: else another process has continued it.
        """
        for file in self._spilled_records():
            place = paths.join(self._run, *file.relative_to(self.records).parts)
            kept = file.read_bytes()
            if file.suffix == ".json" or not paths.exists(place) or kept.startswith(paths.read_bytes(place)):
                paths.write_bytes_atomic(place, kept)
            else:
                log.info("%s has more data than the spilled copy %s, which is not uploaded", place, file)
            file.unlink(missing_ok=True)

    def _spilled_text(self) -> str:
        names = self._names()
        if not names and self._spilled_records():
            return f"records wait in {self.records}"
        return f"{len(names)} checkpoints wait in {self.local}" + (f", the newest {names[-1]}" if names else "")


def key_of(folder: str, *, identity: str) -> str:
    """Return the spool's name for a run folder: a hash of its path and of the time of its identity file.

    So a later run folder at the same path has another spool.
    """
    made = paths.modified_seconds(identity)
    return hashlib.sha256(f"{paths.absolute(folder)}|{made}".encode()).hexdigest()[:20]


def _free_text(place: str) -> str:
    if paths.is_remote(place):
        return "free space of a bucket is unknown"
    folder = Path(place.removeprefix("file://"))
    while not folder.exists():
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB free"
