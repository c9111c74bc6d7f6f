"""faulty://: fsspec's memory file system whose n-th operation goes wrong, in one of the ways a bucket does."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

Fault = Literal["fails", "answer_lost", "refused", "truncates", "delays", "dies", "hangs"]
FAULTS: tuple[Fault, ...] = ("fails", "answer_lost", "refused", "truncates", "delays", "dies")


class Died(BaseException):
    """The process is gone; nothing it does afterwards reaches the storage."""


class FaultyFileSystem(MemoryFileSystem):
    """One store for all instances. An operation is a request: read, write, list, look up, remove one object."""

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012 (fsspec's own way: one store for all instances)
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    fault: Fault | None = None
    at = -1
    """Number of the operation that goes wrong, counted from 0."""
    released = threading.Event()
    """Set where what hangs is to end, as a request that nobody waits for any more."""
    down = False
    """Whether every operation fails as an unreachable bucket does."""
    count = 0

    def info(self, path, **kwargs):
        return self._do(lambda: super(FaultyFileSystem, self).info(path, **kwargs))

    def ls(self, path, detail=True, **kwargs):
        return self._do(lambda: super(FaultyFileSystem, self).ls(path, detail=detail, **kwargs))

    def cat_file(self, path, start=None, end=None, **kwargs):
        return self._do(lambda: self.store[self._strip_protocol(path)].getvalue()[start:end], path=path)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        def write(data: bytes) -> None:
            super(FaultyFileSystem, self).pipe_file(path, data, mode="overwrite", **kwargs)

        self._do(lambda: write(value), torn=lambda: write(value[: len(value) // 2]))

    def put_file(self, lpath, rpath, **kwargs):
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def rm(self, path, recursive=False, maxdepth=None):
        """One request an object, in the order of names, as object stores do it."""
        key = self._strip_protocol(path)
        names = sorted(name for name in self.store if name == key or name.startswith(f"{key}/"))
        if not names:
            raise FileNotFoundError(path)
        for name in names:
            self._do(lambda name=name: self.store.pop(name, None))

    def _do(self, act: Callable[[], Any], *, torn: Callable[[], Any] | None = None, path: str | None = None) -> Any:
        kind = type(self)
        if path is not None and self._strip_protocol(path) not in self.store:
            raise FileNotFoundError(path)
        if kind.down:
            raise ConnectionError("bucket unreachable")
        number, kind.count = kind.count, kind.count + 1
        fault = kind.fault if number == kind.at else None
        if kind.fault == "dies" and number > kind.at:
            raise Died
        if fault == "hangs" or (kind.fault == "hangs" and number > kind.at):
            kind.released.wait(60)
            raise ConnectionResetError(104, "connection reset by peer")
        if fault == "fails":
            raise ConnectionResetError(104, "connection reset by peer")
        if fault == "refused":
            raise OSError("Forbidden: b/bkt/o")
        if fault == "truncates" and torn is not None:
            return torn()
        if fault == "dies":
            (torn or act)()
            raise Died
        if fault == "delays":
            time.sleep(0.02)
        result = act()
        if fault == "answer_lost":
            raise ConnectionResetError(104, "connection reset by peer")
        return result


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)


@contextmanager
def going_wrong(fault: Fault | None, at: int) -> Iterator[type[FaultyFileSystem]]:
    """Count operations from 0; number `at` goes wrong, and after the block none does."""
    kind = FaultyFileSystem
    kind.fault, kind.at, kind.count = fault, at, 0
    kind.released.clear()
    try:
        yield kind
    finally:
        kind.fault, kind.at = None, -1
        kind.released.set()


def wipe() -> None:
    """Remove everything."""
    FaultyFileSystem.store.clear()
    FaultyFileSystem.pseudo_dirs[:] = [""]
    FaultyFileSystem.fault, FaultyFileSystem.down = None, False


def snapshot() -> dict[str, bytes]:
    """Content by key."""
    return {name: file.getvalue() for name, file in FaultyFileSystem.store.items()}
