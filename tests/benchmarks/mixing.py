"""How well rows are mixed: no shuffle, a shuffle buffer, written epochs of 1 to 3 passes, a permutation.

    python -m tests.benchmarks.mixing [--rows 200000] [--block-rows 8192] [--speed-rows 65536]

Three sources hold 70, 25 and 5 % of the rows. A permutation has 1 in every column but the correlations (0). Then the
speed of writing an epoch from shards of rows of 1,024 tokens, and the memory of its arrays.
"""

import argparse
import platform
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import astuple

import numpy as np
from numpy.typing import NDArray

from tests.data.store.mixing import measure_mixing
from tpu_experiments.data.batches import StageRows
from tpu_experiments.data.rows import Rows
from tpu_experiments.data.store.shards import RowStore, row_dtype, write_shard
from tpu_experiments.data.store.shuffle import read_origins, write_epoch
from tpu_experiments.storage import paths

SHARES = (0.7, 0.25, 0.05)
BATCH_ROWS = 256
SEQ_LEN, VOCAB_SIZE = 1024, 50_000
SHARD_ROWS = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--block-rows", type=int, default=8192)
    parser.add_argument("--speed-rows", type=int, default=65_536)
    args = parser.parse_args()
    sizes = [round(share * args.rows) for share in SHARES]
    print(f"{sum(sizes):,} rows from sources of {sizes}, blocks and buffer of {args.block_rows:,}, seed 0\n")
    print(
        "| order | displacement | rank corr. | corr. in source | pairs within a block | source spread | in one batch |"
    )
    print("|---|---|---|---|---|---|---|")
    for title, origins in orders(sizes, block_rows=args.block_rows):
        mixing = measure_mixing(origins, sizes=sizes, batch_rows=BATCH_ROWS, near_rows=args.block_rows)
        print(f"| {title} | " + " | ".join(f"{value:.3f}" for value in astuple(mixing)) + " |", flush=True)
    print(f"\n{args.speed_rows:,} rows of {SEQ_LEN:,} tokens, {platform.machine()}, one process\n")
    print("| block rows | passes | rows/s | million tokens/s | arrays, MiB at once |\n|---|---|---|---|---|")
    measure_speed(args.speed_rows)


def orders(sizes: list[int], *, block_rows: int) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Title and origins of every kind of order."""
    num_rows = sum(sizes)
    yield "none", np.arange(num_rows)
    yield "shuffle buffer", buffer_shuffle(num_rows, buffer_rows=block_rows)
    parts = [random_rows(size, seq_len=1) for size in sizes]
    dtype = row_dtype(1, vocab_size=VOCAB_SIZE)
    for passes in (1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            shape = {"block_rows": block_rows, "rows_per_shard": SHARD_ROWS, "passes": passes}
            shards = write_epoch(parts, folder=folder, seed=0, stage_index=0, epoch=0, dtype=dtype, **shape)
            yield f"written, {passes} pass{'es' * (passes > 1)}", read_origins(folder, shards=shards)
    yield "permutation", StageRows(parts, names=["a", "b", "c"], seed=0, stage_index=0).order(0)


def buffer_shuffle(num_rows: int, *, buffer_rows: int) -> NDArray[np.int64]:
    """As datasets' `IterableDataset.shuffle`: a random row of the buffer goes out, the next row takes its place."""
    generator = np.random.default_rng(0)
    buffer = np.arange(min(buffer_rows, num_rows))
    slots = generator.integers(len(buffer), size=num_rows - len(buffer))
    out = np.empty(num_rows, np.int64)
    for place, slot in enumerate(slots):
        out[place] = buffer[slot]
        buffer[slot] = len(buffer) + place
    out[len(slots) :] = generator.permutation(buffer)
    return out


def random_rows(num_rows: int, *, seq_len: int) -> Rows:
    """Rows of segments of 300 tokens."""
    ids_NT = np.random.default_rng(num_rows).integers(VOCAB_SIZE, size=(num_rows, seq_len), dtype=np.int32)
    column_NT = np.tile(np.arange(seq_len, dtype=np.int32), (num_rows, 1))
    return Rows(ids_NT, column_NT % 300 > 0, column_NT % 300, 1 + column_NT // 300)


def measure_speed(num_rows: int) -> None:
    """A line for each number of passes and block size; the memory is measured in a run of its own."""
    dtype = row_dtype(SEQ_LEN, vocab_size=VOCAB_SIZE)
    with tempfile.TemporaryDirectory() as folder:
        parts = [stored(f"{folder}/{i}", round(share * num_rows)) for i, share in enumerate(SHARES)]
        for block_rows in (2048, 8192, 32_768):
            for passes in (1, 2, 3):
                shape = {"block_rows": block_rows, "rows_per_shard": SHARD_ROWS, "passes": passes}
                seconds, peaks = [], []
                for traced in (False, True):
                    if traced:
                        tracemalloc.start()
                    with tempfile.TemporaryDirectory() as out:
                        started = time.perf_counter()
                        write_epoch(parts, folder=out, seed=0, stage_index=0, epoch=0, dtype=dtype, **shape)
                        seconds.append(time.perf_counter() - started)
                    peaks.append(tracemalloc.get_traced_memory()[1] / 2**20)
                tracemalloc.stop()
                speed = num_rows / seconds[0]
                tokens = speed * SEQ_LEN / 1e6
                print(f"| {block_rows:,} | {passes} | {speed:,.0f} | {tokens:.1f} | {peaks[1]:.0f} |", flush=True)
        for part in parts:
            part.close()


def stored(folder: str, num_rows: int) -> RowStore:
    """Random rows as shards in a folder."""
    dtype = row_dtype(SEQ_LEN, vocab_size=VOCAB_SIZE)
    paths.make_dirs(folder)
    records = []
    for start in range(0, num_rows, SHARD_ROWS):
        rows = random_rows(min(SHARD_ROWS, num_rows - start), seq_len=SEQ_LEN)
        records.append(write_shard(paths.join(folder, f"{start}.npy"), rows, dtype=dtype))
    shards = [(record["name"], record["rows"]) for record in records]
    return RowStore(folder, shards=shards, seq_len=SEQ_LEN, pad_id=0)


if __name__ == "__main__":
    main()
