"""Records of shards: memory-mapped locally; streamed, copied or fetched row by row from a URL."""

import hashlib
import logging
import os
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.regular_files import require_regular
from tpu_experiments.storage import paths
from tpu_experiments.storage.cache import FileCache

ADVICE = "remove the folder it is in and run task=prepare again."
OPEN_MAPS = 512  # a map holds a file descriptor, of which a process often has 1,024
BLOCKS_AHEAD = 8  # fetched in parallel: one stream from a bucket is slower than the network
LARGEST_BLOCK_BYTES = 8 * 2**20
COPIED_PIECE_BYTES = 16 * 2**20
COPY_AGAIN_SECONDS = 30.0

Check = Literal["at_open", "none"]
"""`at_open`: a local shard is hashed when a process first opens it. `none`: it was verified before, or need not be."""
Records = NDArray[np.void]
Index = NDArray[np.int64]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheSettings:
    """Limits on local copies and buffers of a remote folder; a local folder needs none."""

    folder: str | None = None
    """Local folder for copies of whole shards (`cache_folder`); None makes no copies."""
    max_bytes: int = 20 * 2**30
    """Size limit of that folder. If the shards exceed it together, none is copied and rows are fetched one by one."""
    read_ahead_bytes: int = 64 * 2**20
    """Buffer of a stream, in bytes of memory."""


@dataclass(frozen=True)
class ShardFile:
    """Path of a shard, with its row count and SHA-256 from the manifest."""

    path: str
    num_rows: int
    sha256: str | None


@dataclass(frozen=True)
class Shards:
    """Shard files with records of one width."""

    files: tuple[ShardFile, ...]
    dtype: np.dtype[np.void]
    header_bytes: int

    def size(self, shard: int) -> int:
        """Return the size of a shard's file in bytes."""
        return self.extent(0, self.files[shard].num_rows)[1]

    def extent(self, start: int, stop: int) -> tuple[int, int]:
        """Return the byte offsets of row `start` and of row `stop` in a shard's file."""
        width = self.dtype.itemsize
        return self.header_bytes + start * width, self.header_bytes + stop * width


def by_shard(shard_M: Index) -> Iterator[tuple[int, Index]]:
    """Yield each shard that occurs in `shard_M`, and its indices there."""
    order = np.argsort(shard_M, kind="stable")
    for at in np.split(order, np.flatnonzero(np.diff(shard_M[order])) + 1):
        yield int(shard_M[at[0]]), at


class LocalShards:
    """Shards on the local disk, memory-mapped."""

    def __init__(self, shards: Shards, *, check: Check = "none") -> None:
        self._shards, self._check = shards, check
        self._maps: OrderedDict[int, Records] = OrderedDict()
        self._verified: set[int] = set()  # a map that was dropped is opened again without hashing
        self._lock = threading.Lock()

    def read(self, shard: int, start: int, stop: int) -> list[Records]:
        """Return records `start` to `stop` of one shard, as a view."""
        return [self._map(shard)[start:stop]]

    def gather(self, shard_M: Index, row_M: Index) -> Records:
        """Return the records at (shard, row), shape (M,)."""
        records = np.empty(len(row_M), self._shards.dtype)
        opaque = np.dtype((np.void, records.itemsize))  # copies whole records; field by field takes twice as long
        for shard, at in by_shard(shard_M):
            records.view(opaque)[at] = self._map(shard).view(opaque)[row_M[at]]
        return records

    def close(self) -> None:
        """Drop the maps; memory is unmapped once no view refers to it."""
        with self._lock:
            self._maps.clear()

    def _map(self, shard: int) -> Records:
        with self._lock:
            if shard not in self._maps:
                self._maps[shard] = self._mapped(shard)
            self._maps.move_to_end(shard)
            while len(self._maps) > OPEN_MAPS:
                self._maps.popitem(last=False)
            return self._maps[shard]

    def _mapped(self, shard: int) -> Records:
        file, needed = self._shards.files[shard], self._shards.size(shard)
        size = paths.size_of(file.path)
        if size != needed:
            found = "is missing" if size is None else f"has {size:,} bytes where its rows take {needed:,}"
            raise ConfigError(f"{file.path}; the shard {found}; {ADVICE}")
        if self._check == "at_open" and file.sha256 is not None and shard not in self._verified:
            require_sha256_of(file.path, file.sha256, size=needed)
            self._verified.add(shard)
        path, dtype = file.path.removeprefix("file://"), self._shards.dtype
        require_regular(path)
        mapped = np.memmap(path, dtype, mode="r", offset=self._shards.header_bytes, shape=(file.num_rows,))
        return np.asarray(mapped)


def require_sha256_of(path: str, sha256: str, *, size: int) -> None:
    """Verify a file's SHA-256.

    Raises:
        ConfigError: the digest differs, or the file cannot be read.
    """
    digest = hashlib.sha256()
    for start in range(0, size, COPIED_PIECE_BYTES):
        digest.update(paths.read_range(path, start, min(start + COPIED_PIECE_BYTES, size)))
    if digest.hexdigest() != sha256:
        raise ConfigError(
            f"{path}; the shard's sha256 is {digest.hexdigest()}, its manifest says {sha256}; run task=prepare with "
            "the same settings: it is prepared again."
        )


class RemoteShards:
    """Shards behind a URL."""

    def __init__(self, shards: Shards, *, settings: CacheSettings) -> None:
        self._shards = shards
        self._closed = threading.Event()
        self._ahead = ReadAhead(shards, num_bytes=settings.read_ahead_bytes, stop=self._closed.wait)
        self._lock = threading.Lock()
        self._copying: threading.Thread | None = None
        self._failure: ConfigError | None = None
        self._whole: set[int] = set()  # shards whose copy this process has verified
        self._copies: FileCache | None = None
        total_bytes = sum(shards.size(shard) for shard in range(len(shards.files)))
        if settings.folder is not None and total_bytes <= settings.max_bytes:
            self._copies = FileCache(settings.folder, max_bytes=settings.max_bytes)

    def read(self, shard: int, start: int, stop: int) -> list[Records]:
        """Return records `start` to `stop` of one shard, in parts, and fetch those after them ahead."""
        return self._ahead.read(shard, start, stop)

    def gather(self, shard_M: Index, row_M: Index) -> Records:
        """Return records (M,): from verified local copies, else by parallel requests."""
        if self._copies is not None:
            self._start_copying()
        if self._failure is not None:
            raise ConfigError(str(self._failure))
        extents = [self._shards.extent(row, row + 1) for row in row_M.tolist()]
        found = self._copied(shard_M, extents)
        missing = [i for i in range(len(extents)) if i not in found]
        pieces = [(self._shards.files[shard_M[i]].path, *extents[i]) for i in missing]
        found.update(zip(missing, paths.read_ranges(pieces, wait=self._closed.wait), strict=True))
        return np.frombuffer(b"".join(found[i] for i in range(len(extents))), self._shards.dtype)

    def close(self) -> None:
        """Ask the threads to stop; each ends after its current read and is not joined."""
        self._closed.set()
        self._ahead.clear()

    def _copied(self, shard_M: Index, extents: Sequence[tuple[int, int]]) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        if self._copies is None:
            return found
        for shard, at in by_shard(shard_M):
            if shard not in self._whole:
                continue
            name, pieces = copy_name(self._shards.files[shard]), [extents[i] for i in at]
            parts = self._copies.read(name, pieces, size=self._shards.size(shard))
            found.update(zip(at.tolist(), parts or (), strict=False))
        return found

    def _start_copying(self) -> None:
        with self._lock:
            if self._copying is None:
                self._copying = threading.Thread(target=self._copy_all, name="copy_shards", daemon=True)
                self._copying.start()

    def _copy_all(self) -> None:
        missing = list(range(len(self._shards.files)))
        # A different order in each process, so that processes share the work.
        random.Random(f"{os.getpid()} {id(self)}").shuffle(missing)
        while missing and self._failure is None and not self._closed.is_set():
            missing = [shard for shard in missing if not self._copy(shard)]
            self._closed.wait(COPY_AGAIN_SECONDS if missing else 0)

    def _copy(self, shard: int) -> bool:
        """Copy a shard; return False if it has to be tried again."""
        assert self._copies is not None
        if self._closed.is_set() or self._failure is not None:
            return True
        file, size = self._shards.files[shard], self._shards.size(shard)
        try:
            while self._copies.add(copy_name(file), size=size, fill=lambda copy: self._fill(copy, file, size)):
                if self._copies.is_whole(copy_name(file), sha256=file.sha256):
                    self._whole.add(shard)
                    return True
                log.warning("the local copy of %s is damaged: it is downloaded again", file.path)
            return False
        except (ConfigError, OSError) as error:  # network or disk; rows are fetched one by one meanwhile
            if not self._closed.is_set():
                log.warning("%s is read remotely, since it could not be cached: %s", file.path, error)
            return False

    def _fill(self, copy: BinaryIO, file: ShardFile, size: int) -> None:
        digest = hashlib.sha256()
        for start in range(0, size, COPIED_PIECE_BYTES):
            stop = min(start + COPIED_PIECE_BYTES, size)
            piece = paths.read_range(file.path, start, stop, wait=self._closed.wait)
            digest.update(piece)
            copy.write(piece)
        if file.sha256 not in (None, digest.hexdigest()):
            found = f"sha256 is {digest.hexdigest()}, its manifest says {file.sha256}"
            self._failure = ConfigError(f"{file.path}; the shard's {found}; {ADVICE}")
            raise self._failure


def copy_name(file: ShardFile) -> str:
    """Return the file name of a shard's local copy, unique to its path and content."""
    identity = hashlib.sha256(f"{file.path} {file.num_rows} {file.sha256}".encode()).hexdigest()
    return f"{identity[:32]}.npy"


class ReadAhead:
    """Buffer of row blocks with read-ahead: at most `num_bytes`, or the blocks of one larger read.

    Blocks are evicted by last use, so several readers of one stream, and a process that reads every eighth part of it,
    need no special handling.
    """

    def __init__(self, shards: Shards, *, num_bytes: int, stop: Callable[[float], object]) -> None:
        self._shards = shards
        self._stop = stop
        block_bytes = min(num_bytes // BLOCKS_AHEAD, LARGEST_BLOCK_BYTES)
        self._block_rows = max(1, block_bytes // shards.dtype.itemsize)
        self._max_blocks = max(3, num_bytes // (self._block_rows * shards.dtype.itemsize))
        blocks_S = [-(-file.num_rows // self._block_rows) for file in shards.files]
        self._first_S = np.concatenate([[0], np.cumsum(blocks_S, dtype=np.int64)])
        self._blocks: OrderedDict[int, Future[Records]] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, shard: int, start: int, stop: int) -> list[Records]:
        """Return records `start` to `stop` of one shard, in one part per block."""
        first = int(self._first_S[shard]) + start // self._block_rows
        last = int(self._first_S[shard]) + (stop - 1) // self._block_rows
        parts = []
        for block, future in zip(range(first, last + 1), self._wanted(first, last), strict=True):
            offset = (block - int(self._first_S[shard])) * self._block_rows
            parts.append(future.result()[max(0, start - offset) : stop - offset])
        return parts

    def clear(self) -> None:
        """Drop all blocks."""
        with self._lock:
            self._blocks.clear()

    def _wanted(self, first: int, last: int) -> list[Future[Records]]:
        with self._lock:
            # No read-ahead on the first read of a stream: it may be the only one.
            goes_on = first in self._blocks or first - 1 in self._blocks
            ahead = last + self._max_blocks - 2 if goes_on else last
            for block in range(first, min(ahead + 1, int(self._first_S[-1]))):
                failed = block in self._blocks and self._blocks[block].done() and self._blocks[block].exception()
                if block not in self._blocks or failed:
                    self._blocks[block] = self._start(block)
                self._blocks.move_to_end(block)
            wanted = [self._blocks[block] for block in range(first, last + 1)]
            while len(self._blocks) > max(self._max_blocks, len(wanted)):
                self._blocks.popitem(last=False)
            return wanted

    def _start(self, block: int) -> Future[Records]:
        future: Future[Records] = Future()
        # A new thread costs 50 microseconds per several MB; the threads of a pool would be joined when Python exits.
        threading.Thread(target=self._fetch, args=(block, future), name="read_ahead", daemon=True).start()
        return future

    def _fetch(self, block: int, future: "Future[Records]") -> None:
        shard = int(np.searchsorted(self._first_S, block, side="right")) - 1
        file = self._shards.files[shard]
        start = (block - int(self._first_S[shard])) * self._block_rows
        extent = self._shards.extent(start, min(start + self._block_rows, file.num_rows))
        try:
            data = paths.read_range(file.path, *extent, wait=self._stop)
            future.set_result(np.frombuffer(data, self._shards.dtype))
        except BaseException as error:
            future.set_exception(error)
