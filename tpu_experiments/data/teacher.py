"""Stored predictions of a teacher for the rows of prepared data: a folder for every source, row length and split.

<data.NAME.teacher>/NAME-<length>-<split>/manifest.json   what they belong to; written last
                                          00000.npy, ...  rows, each token with its likeliest next ones

A shard is that of prepared rows (data/store/shards.py) with two further arrays, so it holds the tokens that the
predictions belong to: 6 (of a vocabulary above 65,536: 8) bytes an entry. Legend: M rows, T tokens, E entries.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.prepared import MANIFEST, Key, PreparedSource
from tpu_experiments.data.rows import TOKEN_ARRAYS, Array, Rows, RowSource, RowsOver
from tpu_experiments.data.store.shards import LARGEST_16_BIT_VOCABULARY, RowStore, ShardRecord, row_dtype, write_shard
from tpu_experiments.data.store.stream import CacheSettings
from tpu_experiments.storage import paths
from tpu_experiments.storage.sealed import DamagedFile, read_sealed_json, write_sealed_json

IDS, LOGPS = "teacher_ids", "teacher_logps"
FORMAT = 1
SHARD_BYTES = 64 * 2**20
LEAST_LOGP = -100.0
"""Smallest stored log-probability; exp of it is 0 in float32, and a loss of smaller ones would be huge or NaN."""
AGAIN = "write it again by task=prepare task.teacher=, into another folder"


def teacher_arrays(entries: int) -> tuple[Array, ...]:
    """Return the arrays of batches: ids of the likeliest next tokens and their log-probabilities."""
    return Array(IDS, "int32", "token", entries), Array(LOGPS, "float32", "token", entries)


def stored_dtype(seq_len: int, *, entries: int, vocab_size: int) -> np.dtype[np.void]:
    """Return the record type of a stored row."""
    ids = "uint16" if vocab_size <= LARGEST_16_BIT_VOCABULARY else "uint32"
    arrays = Array(IDS, ids, "token", entries), Array(LOGPS, "float32", "token", entries)
    return row_dtype(seq_len, vocab_size=vocab_size, arrays=arrays)


def folder_name(key: Key) -> str:
    """Return the name of the folder of one source's split at a row length."""
    name, split, length = key
    return f"{name}-{length}-{split}"


def rows_hash(source: PreparedSource, key: Key) -> str:
    """Return 64 hex digits that change with any token, mask or place of a split's rows."""
    _, split, length = key
    shards = [record["sha256"] for record in source.manifests[length]["splits"][split]["shards"]]
    return hashlib.sha256(json.dumps(shards).encode()).hexdigest()


@dataclass(frozen=True)
class StoredTeacher:
    """Predictions of a teacher on disk; picklable."""

    folder: str
    manifest: dict[str, Any] = field(repr=False)
    entries: int
    """Entries that are read, at most those stored."""
    pad_id: int
    factor: float = 1.0
    """What log-probabilities are multiplied with: the stored temperature over that asked for."""
    cache: CacheSettings | None = None

    @property
    def digest(self) -> str:
        """Return 16 hex digits of what is stored."""
        told = {name: self.manifest[name] for name in ("rows", "temperature", "top_k", "shards")}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]

    def told(self, rows: RowSource) -> "TaughtRows":
        """Return rows with the predictions."""
        seq_len, pad, records = self.manifest["seq_len"], self.pad_id, self.manifest["shards"]
        store = RowStore.of_records(
            self.folder, records, seq_len=seq_len, pad_id=pad, cache=self.cache, check="at_open"
        )
        return TaughtRows(rows, store, self.entries, self.folder, self.factor)


@dataclass(frozen=True)
class TaughtRows(RowsOver):
    """Rows with a teacher's predictions; a `RowSource`."""

    store: RowStore
    entries: int
    folder: str
    factor: float = 1.0

    def take(self, index_M: NDArray[np.int64] | slice) -> Rows:
        """Return the rows at `index_M`, shape (M, T), with the predictions (M, T, E).

        Raises:
            ConfigError: they belong to other tokens.
        """
        rows, stored = self.rows.take(index_M), self.store.take(index_M)
        for name in ("ids_NT", "segments_NT"):
            if not np.array_equal(getattr(rows, name), getattr(stored, name)):
                raise ConfigError(f"{self.folder}; its predictions belong to other tokens; {AGAIN}.")
        ids, logps = (stored.more[name][..., : self.entries] for name in (IDS, LOGPS))
        return rows.having(**{IDS: ids.astype(np.int32), LOGPS: logps * np.float32(self.factor)})


@dataclass(frozen=True)
class Wanted:
    """What a run asks of the predictions that are stored for it."""

    entries: int
    temperature: float
    converts: bool
    """Whether log-probabilities of another temperature are converted; they are then right up to a constant."""
    tokenizer_hash: str


def read_teacher(
    teacher: str, key: Key, *, source: PreparedSource, num_rows: int, wanted: Wanted, cache: CacheSettings | None
) -> StoredTeacher:
    """Return the stored predictions of a split's first rows.

    Args:
        teacher: `data.<name>.teacher`.

    Raises:
        ConfigError: there are none, they are damaged, or belong to other rows or another tokenizer; a line for each.
    """
    folder, told = paths.join(teacher, folder_name(key)), f"data.{key[0]}.teacher={teacher}"
    try:
        manifest = read_sealed_json(paths.join(folder, MANIFEST), expected={"format": FORMAT})
    except FileNotFoundError as error:
        raise ConfigError(
            f"{told}; {folder} has no predictions of a teacher (or a preparation of it was cut off); write them by "
            "task=prepare task.teacher=RUN with the other settings of this command."
        ) from error
    except DamagedFile as error:
        raise DamagedFile(f"{error} The task=prepare task.teacher= that wrote it writes it again.") from error
    problems = _problems(manifest, key, source=source, num_rows=num_rows, wanted=wanted)
    if problems:
        raise ConfigError("\n".join(f"{told}; {problem}" for problem in problems))
    pad = source.manifests[key[2]]["pad_id"]
    factor = manifest["temperature"] / wanted.temperature
    cache = cache if paths.is_remote(folder) else None
    return StoredTeacher(folder, manifest, wanted.entries, pad, factor, cache)


def _problems(
    manifest: Mapping[str, Any], key: Key, *, source: PreparedSource, num_rows: int, wanted: Wanted
) -> Sequence[str]:
    found = []
    if manifest["tokenizer_hash"] != wanted.tokenizer_hash:
        found.append(
            f"its teacher has another tokenizer ({manifest['tokenizer_hash']}) than this model "
            f"({wanted.tokenizer_hash}), and an id is another token; choose a teacher and a student of one tokenizer."
        )
    if manifest["rows"] != rows_hash(source, key):
        found.append(
            f"{folder_name(key)} was written for other rows: text, chat template, masks, split or packing "
            f"changed since; restore them, or {AGAIN}."
        )
    if manifest["top_k"] < wanted.entries:
        found.append(
            f"objective.top_k={wanted.entries} and {manifest['top_k']} are stored; ask for so many, or {AGAIN}."
        )
    if wanted.temperature != manifest["temperature"] and not wanted.converts:
        found.append(
            f"objective.temperature={wanted.temperature:g} and it was written at {manifest['temperature']:g}; what "
            "other tokens have at another temperature is not known; use objective.temperature="
            f"{manifest['temperature']:g} or objective.rest=renormalised, or {AGAIN}."
        )
    if manifest["num_rows"] < num_rows:
        found.append(
            f"{folder_name(key)} has the first {manifest['num_rows']:,} rows and {num_rows:,} are read; "
            f"lower trainer.max_eval_rows, or {AGAIN}."
        )
    return found


class PredictionWriter:
    """Writes the predictions of one split's rows in order, shard by shard, the manifest last."""

    def __init__(self, folder: str, *, dtype: np.dtype[np.void]) -> None:
        self.folder, self.dtype = folder, dtype
        self.rows_per_shard = max(1, SHARD_BYTES // dtype.itemsize)
        self._waiting: list[Rows] = []
        self._records: list[ShardRecord] = []
        paths.make_dirs(folder)

    def add(self, rows: Rows, *, ids_MTE: NDArray[Any], logps_MTE: NDArray[np.float32]) -> None:
        """Add rows with their predictions, none below `LEAST_LOGP`; those of padding are stored as 0."""
        has_token_MT1 = rows.segments_NT[..., None] > 0
        ids = np.where(has_token_MT1, ids_MTE, 0).astype(self.dtype[IDS].base)
        more = {IDS: ids, LOGPS: np.where(has_token_MT1, np.maximum(logps_MTE, LEAST_LOGP), np.float32(0))}
        tokens = {name: rows.array(name) for name in TOKEN_ARRAYS}
        self._waiting.append(Rows(**{f"{name}_NT": array for name, array in tokens.items()}, more=more))
        if sum(part.num_rows for part in self._waiting) >= self.rows_per_shard:
            self._flush()

    def close(self, **about: Any) -> None:
        """Write what is left, and the manifest with these entries."""
        self._flush()
        num_rows = sum(record["rows"] for record in self._records)
        written = {"num_rows": num_rows, "shards": self._records}
        write_sealed_json(paths.join(self.folder, MANIFEST), {"format": FORMAT, **about, **written}, indent=1)

    def _flush(self) -> None:
        if self._waiting:
            path = paths.join(self.folder, f"{len(self._records):05d}.npy")
            self._records.append(write_shard(path, Rows.concatenate(self._waiting), dtype=self.dtype))
        self._waiting = []


def documents_of(rows: Rows) -> Iterator[tuple[int, slice, NDArray[np.int32]]]:
    """Yield row, place and token ids of every document (or piece of one) of packed rows."""
    for row, segments_T in enumerate(rows.segments_NT):
        for number in range(1, int(segments_T.max(initial=0)) + 1):
            column_L = np.flatnonzero(segments_T == number)
            place = slice(int(column_L[0]), int(column_L[-1]) + 1)
            yield row, place, rows.ids_NT[row, place]


def digest_of(ids_L: NDArray[np.int32]) -> bytes:
    """Return 16 bytes that stand for a document's tokens."""
    return hashlib.sha256(ids_L.astype("<i4").tobytes()).digest()[:16]
