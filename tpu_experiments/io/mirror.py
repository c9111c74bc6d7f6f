"""A file or folder that grows, kept on the local disk when its place is remote.

Object stores cannot append (gcsfs opens "a" as overwrite), so the local copy is uploaded whole every
`UPLOAD_SECONDS` from one background thread, before a checkpoint counts (`upload_all`), and at `close`. Where the place
is local there is no copy: it is written directly and nothing is uploaded. What cannot be uploaded in the end is kept
where `keep_in` says.
"""

import contextlib
import logging
import shutil
import tempfile
import threading
import time
from pathlib import Path

from tpu_experiments.io import paths
from tpu_experiments.io.retry import shown

UPLOAD_SECONDS = 30.0  # event files and logs are kilobytes; GCS allows one update a second per object

log = logging.getLogger(__name__)
_open: list["Mirror"] = []
"""Those of this process whose place is remote."""
_keeping: tuple[str, Path] | None = None


class Mirror:
    """Write to `local`; call `upload_if_due` after each flush and `close` at the end."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._thread: threading.Thread | None = None
        self._uploading = threading.Lock()  # an upload that began earlier must not end later
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
        """A file; what it already holds is there to be continued."""
        held = paths.read_bytes(target) if paths.is_remote(target) and paths.exists(target) else None
        mirror = cls(target)
        if held is not None:
            mirror.local.write_bytes(held)
        return mirror

    @classmethod
    def of_folder(cls, target: str) -> "Mirror":
        """A folder that gets new files; those of earlier processes stay where they are."""
        mirror = cls(target)
        mirror.local.mkdir(parents=True, exist_ok=True)
        return mirror

    def is_below(self, run: str) -> bool:
        """Whether its place is in the folder `run`."""
        return self._target.startswith(run.rstrip("/") + "/")

    def upload_if_due(self) -> None:
        """Start an upload when the last is `UPLOAD_SECONDS` old and done; never waits."""
        running = self._thread is not None and self._thread.is_alive()
        if self._temporary is None or running:
            return
        if time.monotonic() - self._last_upload < UPLOAD_SECONDS:
            return
        self._last_upload = time.monotonic()
        self._thread = threading.Thread(target=self._try_upload, name="mirror", daemon=True)
        self._thread.start()

    def upload(self) -> None:
        """Bring what was written before the call to its place; returns when it is there. Any thread may ask.

        Raises:
            Exception: storage refused.
        """
        if self._temporary is not None:
            self._upload()

    def copy(self) -> Path | None:
        """Copy what is there to where `keep_in` says, and return that folder; None where this mirror is not meant."""
        if _keeping is None or not self.is_below(_keeping[0]):
            return None
        for file in self._files():
            kept = self._kept_at(file, *_keeping)
            kept.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(file, kept)
        return _keeping[1]

    def close(self) -> None:
        """Upload what is there now and remove the local copy.

        Raises:
            OSError: the last upload failed; the local copy is kept and named in the log.
        """
        if self._temporary is None:
            return
        if self._thread is not None:
            self._thread.join()
        try:
            self._upload()
        except Exception:
            log.error("the last upload to %s failed; its data is in %s", self._target, self._keep())
            raise
        finally:
            _open.remove(self)
            self._temporary.cleanup()
            self._temporary = None

    def _keep(self) -> Path:
        """Where the local copy is from now on."""
        folder = self.copy()
        if folder is not None:
            return folder
        kept = Path(tempfile.mkdtemp(prefix="tpu_experiments_kept_")) / self.local.name
        self.local.rename(kept)
        return kept

    def _try_upload(self) -> None:
        """An upload that fails is made good by the next one, and the last one raises; an outage is told once."""
        try:
            self._upload()
        except Exception as error:
            if self._failed_since is None:
                self._failed_since = time.monotonic()
                log.warning("upload to %s failed, to be repeated: %s", self._target, shown(error))
            return
        if self._failed_since is not None:
            minutes = (time.monotonic() - self._failed_since) / 60
            log.warning("upload to %s succeeded after %.1f min", self._target, minutes)
            self._failed_since = None

    def _upload(self) -> None:
        """Every file that has changed; one that is removed meanwhile is passed over."""
        with self._uploading:
            for file in self._files():
                try:
                    state, data = _state(file), file.read_bytes()
                except FileNotFoundError:
                    continue
                if self._uploaded.get(file) != state:
                    paths.write_bytes_atomic(self._place(file), data)
                    self._uploaded[file] = state
                if _keeping is not None and self.is_below(_keeping[0]):
                    self._kept_at(file, *_keeping).unlink(missing_ok=True)  # no newer than what is there

    def _files(self) -> list[Path]:
        if self.local.is_file():
            return [self.local]
        return sorted(file for file in self.local.rglob("*") if file.is_file() and not file.is_symlink())

    def _place(self, file: Path) -> str:
        return paths.join(self._target, *file.relative_to(self.local).parts) if file != self.local else self._target

    def _kept_at(self, file: Path, run: str, folder: Path) -> Path:
        return folder / self._place(file).removeprefix(run)


def _state(file: Path) -> tuple[int, int, int]:
    """Differs once the file has grown or was replaced."""
    stat = file.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def keep_in(folder: Path, *, run: str) -> None:
    """What belongs below `run` and cannot be uploaded at its end is kept in `folder` from now on."""
    global _keeping
    _keeping = run.rstrip("/") + "/", folder


def upload_all(*, run: str) -> None:
    """Bring every record below the folder `run` that was written before the call to its place.

    Raises:
        Exception: storage refused one.
    """
    for mirror in list(_open):
        if mirror.is_below(run):
            mirror.upload()


def copy_all() -> None:
    """Keep a copy of what `upload_all` would bring where `keep_in` says, for the next life on this machine."""
    for mirror in list(_open):
        mirror.copy()
