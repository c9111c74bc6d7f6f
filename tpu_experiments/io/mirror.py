"""A file or folder that grows, kept on the local disk when its place is remote.

Object stores cannot append (gcsfs opens "a" as overwrite), so the local copy is uploaded whole every
`UPLOAD_SECONDS` from one background thread, and at `close`. Where the place is local there is no
copy: it is written directly and nothing is uploaded.
"""

import logging
import tempfile
import threading
import time
from pathlib import Path

from tpu_experiments.io import paths
from tpu_experiments.io.retry import shown

UPLOAD_SECONDS = 30.0  # event files and logs are kilobytes; GCS allows one update a second per object

log = logging.getLogger(__name__)


class Mirror:
    """Write to `local`; call `upload_if_due` after each flush and `close` at the end."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._thread: threading.Thread | None = None
        self._last_upload = time.monotonic()
        self._failed_since: float | None = None
        if paths.is_remote(target):
            self._temporary = tempfile.TemporaryDirectory(prefix="tpu_experiments_")
            self.local = Path(self._temporary.name) / target.rpartition("/")[2]
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
            kept = Path(tempfile.mkdtemp(prefix="tpu_experiments_kept_")) / self.local.name
            self.local.rename(kept)
            log.error("the last upload to %s failed; its data is in %s", self._target, kept)
            raise
        finally:
            self._temporary.cleanup()
            self._temporary = None

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
        if self.local.is_file():
            paths.write_bytes_atomic(self._target, self.local.read_bytes())
        for file in sorted(self.local.rglob("*")):
            if file.is_file() and not file.is_symlink():
                place = paths.join(self._target, *file.relative_to(self.local).parts)
                paths.write_bytes_atomic(place, file.read_bytes())
