"""Local copies of growing files and folders whose target is remote, uploaded at intervals.

Object stores cannot append (gcsfs opens "a" as overwrite), so the local copy is uploaded whole every
`UPLOAD_SECONDS` from one background thread, before a checkpoint is committed (`upload_all`), and at `close`. A local
target is written directly, without copy and upload. What cannot be uploaded in the end is kept in the folder set by
`keep_in`.
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
"""Open mirrors of this process with remote targets."""
_keeping: tuple[str, Path] | None = None


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
        """Copy the local files to the folder set by `keep_in` and return it; None if none is set for this run."""
        if _keeping is None or not self.is_below(_keeping[0]):
            return None
        for file in self._files():
            kept = self._kept_at(file, *_keeping)
            kept.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(file, kept)
        return _keeping[1]

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
            log.error("the last upload to %s failed; its data is in %s", self._target, self._keep())
            raise
        finally:
            _open.remove(self)
            self._temporary.cleanup()
            self._temporary = None

    def _keep(self) -> Path:
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
                log.warning("upload to %s failed, to be repeated: %s", self._target, shown(error))
            return
        if self._failed_since is not None:
            minutes = (time.monotonic() - self._failed_since) / 60
            log.warning("upload to %s succeeded after %.1f min", self._target, minutes)
            self._failed_since = None

    def _upload(self) -> None:
        """Upload every changed file; one that is removed meanwhile is skipped."""
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
                    self._kept_at(file, *_keeping).unlink(missing_ok=True)  # no newer than what was just uploaded

    def _files(self) -> list[Path]:
        if self.local.is_file():
            return [self.local]
        return sorted(file for file in self.local.rglob("*") if file.is_file() and not file.is_symlink())

    def _place(self, file: Path) -> str:
        return paths.join(self._target, *file.relative_to(self.local).parts) if file != self.local else self._target

    def _kept_at(self, file: Path, run: str, folder: Path) -> Path:
        return folder / self._place(file).removeprefix(run)


def _state(file: Path) -> tuple[int, int, int]:
    """Return a fingerprint that changes once the file has grown or was replaced."""
    stat = file.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def keep_in(folder: Path, *, run: str) -> None:
    """Keep files below `run` that cannot be uploaded at the end of the process in `folder` from now on."""
    global _keeping
    _keeping = run.rstrip("/") + "/", folder


def upload_all(*, run: str) -> None:
    """Upload every record below the folder `run` that was written before the call.

    Raises:
        Exception: storage refused one.
    """
    for mirror in list(_open):
        if mirror.is_below(run):
            mirror.upload()


def copy_all() -> None:
    """Copy what `upload_all` would upload to the folder set by `keep_in`, for a restart on this machine."""
    for mirror in list(_open):
        mirror.copy()
