"""Shuffled epochs: the rows of several sources as one new set of shards, in bounded memory.

A pass fills a block of B rows: repeatedly an input is drawn at random, with probability proportional to the rows left
in it, and its next row is taken; the block is shuffled and written. The number of rows that each input contributes to a
block is then a multivariate hypergeometric draw, so the counts are drawn and each input is read sequentially, one run
per block. The inputs of the first pass are the sources; those of every later pass are the blocks of the pass before.

How far a row moves, of N rows of which its source has the share p:
- In one pass: the sources follow one another as in a uniform permutation, but within a source the order stays rough.
  The row at the fraction x of its source moves to x N, give or take sqrt(N x (1 - x) (1 - p) / p) and, within its
  block, B rows. A single source moves within its blocks only.
- In two passes: anywhere. The inputs are now uniformly shuffled blocks, and drawing in proportion to what is left
  makes every way of interleaving them equally likely; so is then each of the N! orders (this merge is MergeShuffle's,
  arXiv 1508.03167).
- A third pass adds nothing, unless N > B * MAX_INPUTS: there an input of a later pass is several blocks.

A later pass reads runs of B^2 / N rows on average, so B should be well over sqrt(N).
"""

import hashlib
import io
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Protocol

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.data.rows import RowSource
from tpu_experiments.data.store.shards import Records, ShardRecord, decode_rows, encode_rows, write_shard
from tpu_experiments.storage import paths

MAX_INPUTS = 4096  # each block reads from every input
READ_TOKENS = 2**20  # decoded at once on the way into a block: 13 MiB


class EpochShard(ShardRecord):
    """Record of a written epoch's shard, and of the .npy file with its rows' origins, int64 (rows,)."""

    origins: str
    origins_sha256: str


def write_epoch(
    parts: Sequence[RowSource],
    *,
    folder: str,
    seed: int,
    stage_index: int,
    epoch: int,
    passes: int,
    block_rows: int,
    rows_per_shard: int,
    dtype: np.dtype[np.void],
) -> list[EpochShard]:
    """Write all rows of `parts` once, in a random order; return the shards' records in order.

    The order is a function of (seed, stage_index, epoch). `folder` is a path or URL. No shard spans two blocks, so it
    has at most `rows_per_shard` and `block_rows` rows. Memory holds `block_rows` encoded rows and one shard's decoded
    `Rows`. Two or more passes need local disk for a copy of the epoch, three or more for two, in a local `folder`, else
    in Python's temporary folder; these files are unnamed and vanish with the process.

    Raises:
        OSError: no room on the disk.
        ValueError: more than 10^9 rows, numpy's limit for drawing.
    """
    paths.make_dirs(folder)
    scratch = None if paths.is_remote(folder) else paths.absolute(folder)
    firsts = np.cumsum([0, *(part.num_rows for part in parts)])[:-1].tolist()
    inputs: list[_Input] = [_Source(part, first=first, dtype=dtype) for part, first in zip(parts, firsts, strict=True)]
    shuffle = _Shuffle((seed, stage_index, epoch), block_rows=block_rows, dtype=dtype)
    with ExitStack() as files:
        for number in range(1, passes):
            with files.pop_all():  # the file of the pass before is read here for the last time
                file = files.enter_context(tempfile.TemporaryFile(dir=scratch))
                inputs = shuffle.rewrite(inputs, number=number, file=file)
        blocks = shuffle.blocks(inputs, number=passes)
        return _write_shards(blocks, folder=folder, rows_per_shard=rows_per_shard, dtype=dtype)


def read_origins(folder: str, *, shards: Sequence[EpochShard]) -> NDArray[np.int64]:
    """Return each written row's index in the concatenated sources, shape (rows of all `shards`,)."""
    arrays = [np.load(io.BytesIO(paths.read_bytes(paths.join(folder, shard["origins"])))) for shard in shards]
    return np.concatenate([np.empty(0, np.int64), *arrays])


class _Input(Protocol):
    """An input of a pass, read sequentially: records with their origins, in pieces."""

    @property
    def num_rows(self) -> int: ...

    def read(self, start: int, stop: int) -> Iterator[Records]: ...


class _Source:
    """Rows of a source; `first` is the origin of its first row."""

    def __init__(self, part: RowSource, *, first: int, dtype: np.dtype[np.void]) -> None:
        self.part = part
        self.first = first
        self.dtype = dtype
        self.num_rows = part.num_rows

    def read(self, start: int, stop: int) -> Iterator[Records]:
        for begin, end in _pieces(start, stop, dtype=self.dtype):
            records = np.empty(end - begin, _with_origin(self.dtype))
            records["origin"] = np.arange(self.first + begin, self.first + end)
            records["row"] = encode_rows(self.part.take(slice(begin, end)), dtype=self.dtype)
            yield records


@dataclass(frozen=True)
class _Stretch:
    """`num_rows` records of a scratch file, from record `first`."""

    file: IO[bytes]
    first: int
    num_rows: int
    dtype: np.dtype[np.void]

    def read(self, start: int, stop: int) -> Iterator[Records]:
        dtype = _with_origin(self.dtype)
        for begin, end in _pieces(start, stop, dtype=self.dtype):
            place = (self.first + begin) * dtype.itemsize
            yield np.frombuffer(os.pread(self.file.fileno(), (end - begin) * dtype.itemsize, place), dtype)


def _pieces(start: int, stop: int, *, dtype: np.dtype[np.void]) -> Iterator[tuple[int, int]]:
    num_rows = max(1, READ_TOKENS // dtype["ids"].shape[0])
    for begin in range(start, stop, num_rows):
        yield begin, min(begin + num_rows, stop)


def _with_origin(dtype: np.dtype[np.void]) -> np.dtype[np.void]:
    return np.dtype([("origin", "<i8"), ("row", dtype)])


@dataclass(frozen=True)
class _Shuffle:
    """The passes of one epoch; `key` is (seed, stage_index, epoch)."""

    key: tuple[int, int, int]
    block_rows: int
    dtype: np.dtype[np.void]

    def blocks(self, inputs: Sequence[_Input], *, number: int) -> Iterator[Records]:
        """Yield the blocks of pass `number`, from 1.

        All share one buffer: a block is valid only until the next is requested.
        """
        generator = self._generator(number)
        left_K = np.array([part.num_rows for part in inputs], np.int64)
        taken_K = np.zeros_like(left_K)
        memory = np.empty(min(self.block_rows, int(left_K.sum())), _with_origin(self.dtype))
        while (num_left := int(left_K.sum())) > 0:
            block = memory[:num_left]
            counts_K = generator.multivariate_hypergeometric(left_K, len(block), method="marginals")
            places = generator.permutation(len(block))
            filled = 0
            for index in np.flatnonzero(counts_K).tolist():
                start = int(taken_K[index])
                for records in inputs[index].read(start, start + int(counts_K[index])):
                    block[places[filled : filled + len(records)]] = records
                    filled += len(records)
            left_K -= counts_K
            taken_K += counts_K
            yield block

    def rewrite(self, inputs: Sequence[_Input], *, number: int, file: IO[bytes]) -> list[_Input]:
        """Write pass `number` into `file`; return its blocks as inputs of the next pass.

        Several blocks form one input where there are more than `MAX_INPUTS`.
        """
        sizes = []
        for block in self.blocks(inputs, number=number):
            file.write(block.data)
            sizes.append(len(block))
        file.flush()
        step = self.block_rows * max(1, -(-len(sizes) // MAX_INPUTS))
        starts = range(0, sum(sizes), step)
        return [_Stretch(file, start, min(step, sum(sizes) - start), self.dtype) for start in starts]

    def _generator(self, number: int) -> np.random.Generator:
        # The key of `StageRows.order`. The pass is the counter's top word, which incrementing never reaches.
        seed, stage_index, epoch = self.key
        key = np.array([seed % 2**64, stage_index << 32 | epoch], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, number], np.uint64)))


def _write_shards(
    blocks: Iterator[Records], *, folder: str, rows_per_shard: int, dtype: np.dtype[np.void]
) -> list[EpochShard]:
    shards: list[EpochShard] = []
    for block in blocks:
        for records in np.array_split(block, -(-len(block) // rows_per_shard)):
            name, origins = f"{len(shards):05d}.npy", f"{len(shards):05d}.origins.npy"
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, np.ascontiguousarray(records["origin"]), version=(1, 0))
            paths.write_bytes_atomic(paths.join(folder, origins), buffer.getvalue())
            digest = hashlib.sha256(buffer.getvalue()).hexdigest()
            record = write_shard(paths.join(folder, name), decode_rows(records["row"], pad_id=0), dtype=dtype)
            shards.append(EpochShard(**record, origins=origins, origins_sha256=digest))
    return shards
