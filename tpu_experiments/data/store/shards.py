"""Row storage: a shard is one .npy file of fixed-width records, so that row i is found by arithmetic.

A record of T tokens holds ids (2 or 4 bytes each), two bit masks (learn, and the first token of every segment) and the
number of tokens before the padding, then the further arrays that an objective declares. Positions and segments are
derived from those: 2.25 bytes a token for 16-bit ids, where `Rows` takes 13. `numpy.load(path, mmap_mode="r")` opens a
shard without this package.
"""

import base64
import hashlib
import io
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.rows import Array, Rows, empty
from tpu_experiments.data.store.stream import (
    ADVICE,
    CacheSettings,
    Check,
    LocalShards,
    Records,
    RemoteShards,
    ShardFile,
    Shards,
)
from tpu_experiments.storage import paths
from tpu_experiments.storage.sealed import DamagedFile

LARGEST_16_BIT_VOCABULARY = 2**16
ENCODED_ROWS = 256  # encoded at a time: a few MB of scratch arrays, where a shard of 16 Mi tokens would take 600 MB
DECODED_ROWS = 1024  # decoded at a time, to bound the scratch arrays of a large take
PIECE_BYTES = 2**20  # read and hashed at a time: stays in the core's cache
CHECKS_AT_ONCE = min(16, os.cpu_count() or 1)  # disk throughput does not grow with more readers
FIELDS = ("ids", "learn", "starts", "length")
"""Fields of a record in front of further arrays."""
HEADER_BYTES = 4096  # numpy's header of a shard takes 256


class ShardRecord(TypedDict):
    """A shard's entry in a manifest."""

    name: str
    rows: int
    bytes: int
    sha256: str
    md5: NotRequired[str]
    """Hexadecimal; object stores report it, so that a remote shard is verified without reading it."""


def row_dtype(seq_len: int, *, vocab_size: int, arrays: Sequence[Array] = ()) -> np.dtype[np.void]:
    """Return the record type of a row of `seq_len` tokens whose ids are below `vocab_size`, with further arrays."""
    ids = "<u2" if vocab_size <= LARGEST_16_BIT_VOCABULARY else "<u4"
    mask_bytes = -(-seq_len // 8)
    return np.dtype(
        [
            ("ids", ids, (seq_len,)),
            ("learn", "u1", (mask_bytes,)),
            ("starts", "u1", (mask_bytes,)),
            ("length", "<u4"),
            *((a.name, np.dtype(a.dtype).newbyteorder("<"), a.shape((seq_len,))) for a in arrays),
        ]
    )


def arrays_entry(arrays: Sequence[Array]) -> dict[str, Any]:
    """Return the entry `arrays` of records and manifests; none where rows have the four arrays of tokens alone."""
    entries = [{k: v for k, v in asdict(array).items() if k != "width" or v} for array in arrays]
    return {"arrays": entries} if arrays else {}


def encode_rows(rows: Rows, *, dtype: np.dtype[np.void]) -> Records:
    """Encode rows as records of shape (N,); ids of padding become 0.

    Raises:
        ValueError: the rows would not survive a round trip (ids too large for `dtype`, padding before a token,
            segments or positions that do not count up, a trained token that is padding or a segment's first).
    """
    records = np.zeros(rows.num_rows, dtype)
    for start in range(0, rows.num_rows, ENCODED_ROWS):
        part = slice(start, start + ENCODED_ROWS)
        _encode_into(records[part], rows.take(part), first_row=start)
    return records


def _encode_into(records: Records, rows: Rows, *, first_row: int) -> None:
    tokens_NT = rows.segments_NT > 0
    ids_NT = rows.ids_NT * tokens_NT
    largest = np.iinfo(records.dtype["ids"].base).max
    if not 0 <= int(ids_NT.min()) <= int(ids_NT.max()) <= largest:
        raise ValueError(f"ids {ids_NT.min()} to {ids_NT.max()} do not fit into 0 to {largest}; see row_dtype")
    records["ids"] = ids_NT
    records["learn"] = np.packbits(rows.learn_NT, axis=1)
    records["starts"] = np.packbits(tokens_NT & (rows.positions_NT == 0), axis=1)
    records["length"] = tokens_NT.sum(axis=1)
    own = rows.more.keys() & set(_further(records.dtype))
    if own != rows.more.keys():
        raise ValueError(f"rows have {sorted(rows.more.keys() - own)}, which the shard has no place for; see row_dtype")
    for name in own:
        records[name] = rows.more[name]
    decoded = decode_rows(records, pad_id=0)
    wrong_NT = (rows.segments_NT != decoded.segments_NT) | (rows.positions_NT != decoded.positions_NT)
    wrong_NT |= rows.learn_NT & (rows.positions_NT == 0)  # padding has position 0 as well
    if wrong_NT.any():
        row, column = np.argwhere(wrong_NT)[0].tolist()
        raise ValueError(
            f"row {first_row + row}, column {column} is not valid: segment {rows.segments_NT[row, column]}, position "
            f"{rows.positions_NT[row, column]}, learn {rows.learn_NT[row, column]}; data/rows.py says what is"
        )


def decode_rows(records: Records, *, pad_id: int) -> Rows:
    """Decode records of shape (N,) into rows; the inverse of `encode_rows`."""
    seq_len = records.dtype["ids"].shape[0]
    ids_NT = records["ids"].astype(np.int32)
    learn_NT = np.unpackbits(records["learn"], axis=1, count=seq_len).view(np.bool_)
    starts_NT = np.unpackbits(records["starts"], axis=1, count=seq_len)
    column_T = np.arange(seq_len, dtype=np.int32)
    tokens_NT = column_T < records["length"].astype(np.int32)[:, None]
    if pad_id:
        np.copyto(ids_NT, np.int32(pad_id), where=~tokens_NT)
    segments_NT = np.cumsum(starts_NT, axis=1, dtype=np.int32)
    segments_NT *= tokens_NT
    # The start column of a token's segment is a running sum of the distances between starts: 4.4 microseconds to
    # decode a row of 1,024 tokens, against 14 with a running maximum.
    first_S = np.flatnonzero(starts_NT)
    column_S = first_S % seq_len
    distance_NT = np.zeros(ids_NT.shape, np.int32)
    distance_NT.reshape(-1)[first_S] = np.where(column_S == 0, 0, np.diff(column_S, prepend=0))
    positions_NT = column_T - np.cumsum(distance_NT, axis=1, dtype=np.int32)
    positions_NT *= tokens_NT
    more = {name: records[name].astype(records[name].dtype.newbyteorder("=")) for name in _further(records.dtype)}
    return Rows(ids_NT, learn_NT, positions_NT, segments_NT, more)


def _further(dtype: np.dtype[np.void]) -> tuple[str, ...]:
    return (dtype.names or ())[len(FIELDS) :]


def write_shard(path: str, rows: Rows, *, dtype: np.dtype[np.void]) -> ShardRecord:
    """Write a shard to a path or URL atomically; the same rows yield the same bytes.

    Raises:
        ValueError: `rows` are not valid, see `encode_rows`.
    """
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, encode_rows(rows, dtype=dtype), version=(1, 0), allow_pickle=False)
    data = buffer.getvalue()
    paths.write_bytes_atomic(path, data)
    return record_of(path.rpartition("/")[2], data, rows=rows.num_rows)


def record_of(name: str, data: bytes, *, rows: int) -> ShardRecord:
    """Return a file's manifest record."""
    sha256, md5 = hashlib.sha256(data).hexdigest(), hashlib.md5(data, usedforsecurity=False).hexdigest()
    return ShardRecord(name=name, rows=rows, bytes=len(data), sha256=sha256, md5=md5)


def read_header(data: bytes) -> tuple[np.dtype[np.void], int, int]:
    """Return (record type, rows, bytes before the first record) from the first bytes of a shard.

    Raises:
        ValueError: `data` is not the beginning of a shard.
    """
    file = io.BytesIO(data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("not a .npy file of version 1.0")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if (dtype.names or ())[: len(FIELDS)] != FIELDS or len(shape) != 1:
        raise ValueError(f"a .npy file of {dtype}, not of rows")
    return dtype, int(shape[0]), file.tell()


def verify_shard(path: str, record: Mapping[str, Any]) -> None:
    """Verify the size and SHA-256 of the shard at a path or URL against its manifest record.

    Raises:
        DamagedFile: the shard is missing, or size or hash differ.
        ConfigError: it cannot be read.
    """
    size = paths.size_of(path)
    if size is None:
        raise DamagedFile(f"{path}; the shard is missing.")
    if size != record["bytes"]:
        raise DamagedFile(f"{path}; the shard has {size:,} bytes, its manifest says {record['bytes']:,}.")
    digest = hashlib.sha256()
    for start in range(0, size, PIECE_BYTES):
        digest.update(paths.read_range(path, start, min(start + PIECE_BYTES, size)))
    if digest.hexdigest() != record["sha256"]:
        raise DamagedFile(f"{path}; the shard's sha256 is {digest.hexdigest()}, its manifest says {record['sha256']}.")


def damaged_shards(folder: str, records: Sequence[ShardRecord], *, md5: Mapping[str, str]) -> list[str]:
    """Return a sentence for every shard of the folder that is missing or damaged, in order.

    Shards are verified in parallel threads: hashing releases the GIL. Where a bucket reports the MD5 of its objects,
    only that metadata is read, one request a shard.

    Args:
        md5: hexadecimal MD5 by name, where known.

    Raises:
        ConfigError: a shard cannot be read.
    """

    def complaint(record: ShardRecord) -> str | None:
        path, known = paths.join(folder, record["name"]), md5.get(record["name"])
        try:
            if not known or not paths.is_remote(folder) or not _has_md5(path, known, num_bytes=record["bytes"]):
                verify_shard(path, record)
        except DamagedFile as error:
            return str(error)
        return None

    with ThreadPoolExecutor(CHECKS_AT_ONCE, thread_name_prefix="check_shards") as pool:
        return [found for found in pool.map(complaint, records) if found is not None]


def _has_md5(path: str, md5: str, *, num_bytes: int) -> bool:
    """Return whether the store reports this MD5 for the object (gcsfs: `md5Hash`); False without one."""
    try:
        about = paths.remote_info(path)
    except FileNotFoundError as error:
        raise DamagedFile(f"{path}; the shard is missing.") from error
    md5_hash = about.get("md5Hash")
    return md5_hash is not None and base64.b64decode(md5_hash).hex() == md5 and int(about["size"]) == num_bytes


class RowStore:
    """Rows of a folder's shards, concatenated; a `rows.RowSource`.

    Nothing is opened before the first `take` of each process, so a store can be pickled. Several threads may call
    `take`. Local shards are memory-mapped. In a remote folder a slice (or positions that count up by one) is streamed
    with read-ahead; other positions are read row by row, or from local copies of the shards where `cache.folder` is set
    and all of them fit into `cache.max_bytes`.
    """

    _opened: LocalShards | RemoteShards | None

    def __init__(
        self,
        folder: str,
        *,
        shards: Sequence[tuple[str, int]],
        seq_len: int,
        pad_id: int,
        cache: CacheSettings | None = None,
        sha256: Mapping[str, str] | None = None,
        check: Check = "none",
        revise: Callable[[Rows], Rows] | None = None,
    ) -> None:
        """Describe a store; no file is opened.

        Args:
            shards: (name, rows) of each, in order.
            sha256: by name; verified when a shard is copied to the cache, and for a local shard when it is opened if
                `check` is `at_open`.
            revise: brings rows of an earlier version into the form of today.
        """
        hashes = sha256 or {}
        self._files = tuple(ShardFile(paths.join(folder, name), rows, hashes.get(name)) for name, rows in shards)
        self._ends_S = np.cumsum([file.num_rows for file in self._files], dtype=np.int64)
        self._seq_len = seq_len
        self._pad_id = pad_id
        self._cache = cache or CacheSettings()
        self._check, self._revise = check, revise
        self._forget()

    @classmethod
    def of_records(cls, folder: str, records: Sequence[ShardRecord], **others: Any) -> "RowStore":
        """Return the store of shards described by `write_shard`; `others` as for the class."""
        sha256 = {record["name"]: record["sha256"] for record in records}
        return cls(folder, shards=[(r["name"], r["rows"]) for r in records], sha256=sha256, **others)

    @property
    def num_rows(self) -> int:
        return int(self._ends_S[-1]) if len(self._ends_S) else 0

    @property
    def seq_len(self) -> int:
        return self._seq_len

    def take(self, index_M: NDArray[np.int64] | slice) -> Rows:
        """Return the rows at `index_M`, shape (M, T), in that order.

        Raises:
            IndexError: a position is outside the rows.
            ConfigError: a shard is missing, cannot be read, or does not match the manifest.
        """
        parts = self._records(index_M)
        pieces = [part[i : i + DECODED_ROWS] for part in parts for i in range(0, len(part), DECODED_ROWS)]
        if not pieces:
            return empty(self._seq_len)
        rows = Rows.concatenate([decode_rows(piece, pad_id=self._pad_id) for piece in pieces])
        return rows if self._revise is None else self._revise(rows)

    def close(self) -> None:
        """Release files and threads; a later `take` opens them again."""
        with self._lock:
            if self._opened is not None:
                self._opened.close()
            self._opened = None

    def _records(self, index_M: NDArray[np.int64] | slice) -> list[Records]:
        if isinstance(index_M, slice):
            start, stop, step = index_M.indices(self.num_rows)
            if step == 1:
                return self._contiguous(start, stop)
            index_M = np.arange(start, stop, step)
        given_M = np.asarray(index_M, np.int64)
        index_M = np.where(given_M < 0, given_M + self.num_rows, given_M)
        if len(index_M) == 0:
            return []
        if index_M.min() < 0 or index_M.max() >= self.num_rows:
            raise IndexError(f"positions {given_M.min()} to {given_M.max()} of {self.num_rows} rows")
        if len(index_M) > 1 and bool((np.diff(index_M) == 1).all()):
            return self._contiguous(int(index_M[0]), int(index_M[-1]) + 1)
        shard_M = np.searchsorted(self._ends_S, index_M, side="right")
        before_M = np.concatenate([[0], self._ends_S])[shard_M]
        return [self._source().gather(shard_M, index_M - before_M)]

    def _contiguous(self, start: int, stop: int) -> list[Records]:
        parts: list[Records] = []
        while start < stop:
            shard = int(np.searchsorted(self._ends_S, start, side="right"))
            end = int(self._ends_S[shard])
            first = end - self._files[shard].num_rows
            parts += self._source().read(shard, start - first, min(stop, end) - first)
            start = end
        return parts

    def _source(self) -> LocalShards | RemoteShards:
        if self._process != os.getpid():  # forked: the parent's threads and connections do not exist here
            self._forget()
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    def _open(self) -> LocalShards | RemoteShards:
        first = next(file for file in self._files if file.num_rows)
        size = paths.size_of(first.path)
        head = paths.read_range(first.path, 0, min(HEADER_BYTES, size or HEADER_BYTES))
        try:
            dtype, num_rows, header_bytes = read_header(head)
        except ValueError as error:
            raise ConfigError(f"{first.path}; it is {error}; {ADVICE}") from error
        shape = (num_rows, dtype["ids"].shape[0])
        if shape != (first.num_rows, self._seq_len):
            raise ConfigError(
                f"{first.path}; the shard has {shape[0]:,} rows of {shape[1]:,} tokens, its manifest says "
                f"{first.num_rows:,} of {self._seq_len:,}; {ADVICE}"
            )
        shards = Shards(self._files, dtype, header_bytes)
        return (
            RemoteShards(shards, settings=self._cache)
            if paths.is_remote(first.path)
            else LocalShards(shards, check=self._check)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_opened", "_process")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._opened = None
        self._process = os.getpid()
