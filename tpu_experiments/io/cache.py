"""Whole copies of remote files in one local folder of bounded size, shared by the processes of a machine.

Content under a name never changes, so a reader needs no lock: it finds the whole file or none. Writers hold a lock on
the folder while they make room, and one on their temporary file until it has its name; the lock of a dead process is
gone, which is how its temporary file is known and removed.
"""

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tpu_experiments.config.errors import ConfigError

KEPT_SECONDS = 300.0  # what was read this recently is not removed: two readers would undo each other's work
NOTED_SECONDS = 60.0  # the time of the last use is written no more often

TEMPORARY_SUFFIX = ".tmp"


def default_folder() -> str:
    """`$XDG_CACHE_HOME/tpu_experiments/shards`, or the same in `~/.cache`."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "tpu_experiments", "shards")


class FileCache:
    """Files of `folder`, together at most `max_bytes`, counting those that are being written."""

    def __init__(self, folder: str, *, max_bytes: int) -> None:
        """Make the folder.

        Raises:
            ConfigError: it cannot be made.
        """
        self._folder = Path(folder)
        self._max_bytes = max_bytes
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}; local copies cannot be kept there: {error}; name another folder.") from error

    def read(self, name: str, pieces: Sequence[tuple[int, int]], *, size: int) -> list[bytes] | None:
        """Bytes start to stop of each piece; None when the file is not here. One of another size is removed.

        The file is opened anew each time (20 microseconds): a mapping would keep the bytes of a removed file on disk.
        """
        path = self._folder / name
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(descriptor)
            if status.st_size != size:
                path.unlink(missing_ok=True)
                return None
            if time.time() - status.st_mtime > NOTED_SECONDS:
                os.utime(descriptor)
            return [os.pread(descriptor, stop - start, start) for start, stop in pieces]
        finally:
            os.close(descriptor)

    def holds(self, name: str, *, size: int) -> bool:
        """Whether the whole file is here."""
        return self.read(name, [], size=size) is not None

    def is_whole(self, name: str, *, sha256: str | None) -> bool:
        """Whether the file is here and has this digest, if one is given; one that has another is removed."""
        path, digest = self._folder / name, hashlib.sha256()
        try:
            with path.open("rb") as file:
                while piece := file.read(2**20):
                    digest.update(piece)
        except FileNotFoundError:
            return False
        if sha256 not in (None, digest.hexdigest()):
            path.unlink(missing_ok=True)
            return False
        return True

    def add(self, name: str, *, size: int, fill: Callable[[BinaryIO], object]) -> bool:
        """Let `fill` write the file's `size` bytes; True when the file is here afterwards.

        False when another process is writing it, or when there is no room: the least recently read files make way,
        except those read in the last `KEPT_SECONDS`. Nothing is left behind when `fill` raises.
        """
        path, temporary = self._folder / name, self._folder / f"{name}{TEMPORARY_SUFFIX}"
        with self._locked():
            if self.holds(name, size=size):
                return True
            has_room = self._make_room(size)
            if temporary.exists() or not has_room:
                return False
            file = temporary.open("xb")
            fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(size)  # counts in full from now on
        with file:
            try:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
                with self._locked():
                    os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        return True

    def _make_room(self, num_bytes: int) -> bool:
        """Remove what dead processes left, then least recently read files until `num_bytes` more fit."""
        if num_bytes > self._max_bytes:
            return False
        files = [file for file in self._folder.iterdir() if not _is_removed(file)]
        sizes = {file: file.stat() for file in files}
        total = sum(status.st_size for status in sizes.values())
        for file in sorted(files, key=lambda file: sizes[file].st_mtime):
            if total + num_bytes <= self._max_bytes:
                break
            is_recent = time.time() - sizes[file].st_mtime < KEPT_SECONDS
            if file.suffix != TEMPORARY_SUFFIX and not is_recent and sizes[file].st_size:
                file.unlink(missing_ok=True)
                total -= sizes[file].st_size
        return total + num_bytes <= self._max_bytes

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._folder / ".lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _is_removed(file: Path) -> bool:
    """Whether it was a temporary file of a process that is gone, and now is not there any more."""
    if file.suffix != TEMPORARY_SUFFIX:
        return False
    with file.open("rb") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        file.unlink()
        return True
