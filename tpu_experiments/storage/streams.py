"""Streaming reads of local and remote files, decompressed on the way, in bounded memory.

The decompressors are called here and not through `fsspec.open(compression=...)`: the zstandard reader that fsspec
uses ends silently at a truncation and after the first frame, and its gzip reader drops what it had decompressed.
"""

import bz2
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from tpu_experiments.config.regular_files import NotRegular, open_regular
from tpu_experiments.storage.paths import filesystem_of, is_remote
from tpu_experiments.storage.retry import with_timeout

CHUNK_BYTES = 1 << 20
PACKED_CHUNK_BYTES = 1 << 14  # unpacks to 16 MiB at most with gzip (1032 : 1), to 80 KiB of text typically
REMOTE_BLOCK_BYTES = 16 << 20
SUFFIXES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstandard"}


class UnreadableError(Exception):
    """A read failed because of the disk, the network or a permission, not because of the content."""


def open_binary(url: str) -> BinaryIO:
    """Open a file for reading from start to end.

    Raises:
        UnreadableError: it cannot be opened.
        NotRegular: it is a device, named pipe or socket.
    """
    try:
        if not is_remote(url):
            return open_regular(url.removeprefix("file://"))
        return with_timeout(lambda: _open_remote(url), place=url, operation="open")
    except NotRegular:
        raise
    except Exception as error:  # every file system and its client raise types of their own
        raise UnreadableError(_complaint(error)) from error


def _open_remote(url: str) -> BinaryIO:
    filesystem, key = filesystem_of(url)
    # gcsfs' own default ("adaptive") buffers up to 600 MB per file.
    opened: Any = RemoteFile(filesystem.open(key, "rb", cache_type="readahead", block_size=REMOTE_BLOCK_BYTES), url=url)
    remote: BinaryIO = opened
    return remote


class RemoteFile:
    """An open remote file whose reads time out as in `with_timeout`."""

    def __init__(self, file: Any, *, url: str) -> None:
        self._file, self._url = file, url

    def __enter__(self) -> "RemoteFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return bool(self._file.closed)

    def read(self, size: int = -1) -> bytes:
        """Read the next `size` bytes; all that are left if negative."""
        return with_timeout(lambda: bytes(self._file.read(size)), place=self._url, operation="read")

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a byte offset; return the new position."""
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        """Return the position of the next byte."""
        return int(self._file.tell())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ByteStream:
    """Iterates over the decompressed bytes of a file, in chunks; `damage` is set if they end too early.

    Damage raises nothing, so that everything before it is read.
    """

    def __init__(self, url: str, *, compression: str | None = None) -> None:
        self.url = url
        self.compression = compression
        self.damage: str | None = None
        """Description of damage in the compressed data; None if there is none. Valid after the iteration."""

    def __iter__(self) -> Iterator[bytes]:
        """Yield the decompressed bytes in chunks.

        Raises:
            UnreadableError: the disk or the network failed during the iteration.
        """
        with open_binary(self.url) as file:
            if self.compression is None:
                yield from _chunks(file, CHUNK_BYTES)
            else:
                yield from self._unpacked(file, self.compression)

    def _unpacked(self, file: BinaryIO, compression: str) -> Iterator[bytes]:
        engine: Any = None
        num_bytes = num_streams = 0
        for packed in _chunks(file, PACKED_CHUNK_BYTES):
            while packed:
                if engine is None:
                    packed = packed.lstrip(b"\0") if num_streams else packed  # tapes and xz pad with zeros
                    if not packed:
                        break
                    engine = _ENGINE_OF[compression]()
                try:
                    data = engine.decompress(packed)
                except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, MemoryError, _zstd_error()) as error:
                    self.damage = f"the {compression} data is damaged after {num_bytes} unpacked bytes ({error})"
                    return
                num_bytes += len(data)
                packed = b""
                if engine.eof:  # another stream may follow: `cat a.gz b.gz`, pigz, pzstd
                    packed, engine, num_streams = engine.unused_data, None, num_streams + 1
                yield data
        if engine is not None or not num_streams:
            self.damage = f"the {compression} data ends early, after {num_bytes} unpacked bytes"


class ReadableStream(io.RawIOBase):
    """A ByteStream as a file object, for readers that need one."""

    def __init__(self, stream: ByteStream) -> None:
        self._chunks = iter(stream)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer from at most one chunk and return the number of bytes; 0 at the end."""
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


class WatchedFile:
    """A file object for C++ readers, which mask Python's errors by their own: `failure` keeps the first."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.failure: Exception | None = None

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._file.closed

    def read(self, size: int = -1) -> bytes:
        """Read the next `size` bytes; all that are left if negative."""
        try:
            return self._file.read(size)
        except Exception as error:
            self.failure = self.failure or error
            raise

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a byte offset; return the new position."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def require_read(self) -> None:
        """Check that no read failed.

        Raises:
            UnreadableError: the disk or the network failed.
        """
        if self.failure is not None:
            raise UnreadableError(_complaint(self.failure)) from self.failure


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    while True:
        try:
            chunk = file.read(size)
        except Exception as error:  # every file system and its client raise types of their own
            raise UnreadableError(_complaint(error)) from error
        if not chunk:
            return
        yield chunk


def _complaint(error: Exception) -> str:
    first_line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {first_line}"


def _zstd_engine() -> Any:
    import zstandard  # only where a .zst file is read

    return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()  # `zstd --long=31`


def _zstd_error() -> type[Exception]:
    import zstandard

    error: type[Exception] = zstandard.ZstdError
    return error


_ENGINE_OF: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(wbits=31),
    "bzip2": bz2.BZ2Decompressor,
    "xz": lzma.LZMADecompressor,
    "zstandard": _zstd_engine,
}
