"""Cache of remote files in one local folder of bounded size, shared by the processes of a machine.

Content under a name never changes, so a reader needs no lock: it finds the whole file or none. Writers hold a lock on
the folder while they make room, and one on their temporary file until it is renamed; the lock of a dead process is
released, which is how its temporary file is recognised and removed.
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

KEPT_SECONDS = 300.0  # files read this recently are not evicted: two readers would evict each other's files
NOTED_SECONDS = 60.0  # shortest interval between updates of a file's time of last use

TEMPORARY_SUFFIX = ".tmp"


class FileCache:
    """Cached files in `folder`, of `max_bytes` at most in total, including those being written."""

    def __init__(self, folder: str, *, max_bytes: int) -> None:
        """Create the folder.

        Raises:
            ConfigError: it cannot be created.
        """
        self._folder = Path(folder)
        self._max_bytes = max_bytes
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}; local copies cannot be kept there: {error}; name another folder.") from error

    def read(self, name: str, pieces: Sequence[tuple[int, int]], *, size: int) -> list[bytes] | None:
        """Return bytes start to stop of each piece; None if the file is not cached.

        A file of another size is removed. The file is opened every time (20 microseconds): a memory map would keep the
        bytes of a removed file on disk.
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
        """Return whether the whole file is cached."""
        return self.read(name, [], size=size) is not None

    def is_whole(self, name: str, *, sha256: str | None) -> bool:
        """Return whether the file is cached and has this digest, if given; one with another digest is removed."""
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
        """Cache a file of `size` bytes, written by `fill`; return whether it is cached afterwards.

        False if another process is writing it, or if there is no room: the least recently read files are evicted,
        except those read in the last `KEPT_SECONDS`. Nothing is left behind when `fill` raises.
        """
        path, temporary = self._folder / name, self._folder / f"{name}{TEMPORARY_SUFFIX}"
        with self._locked():
            if self.holds(name, size=size):
                return True
            has_room = self._free_space(size)
            if temporary.exists() or not has_room:
                return False
            file = temporary.open("xb")
            fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(size)  # reserves its full size in the cache's total
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

    def _free_space(self, num_bytes: int) -> bool:
        """Remove temporary files of dead processes, then least recently read files until `num_bytes` more fit."""
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
    """Remove the file if it is a temporary one of a dead process; return whether it was."""
    if file.suffix != TEMPORARY_SUFFIX:
        return False
    with file.open("rb") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        file.unlink()
        return True
