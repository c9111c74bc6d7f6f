"""The same rows in five formats: how each is written and read. Used by row_formats.py."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tpu_experiments.data.rows import Rows
from tpu_experiments.data.store.shards import RowStore, decode_rows, encode_rows, row_dtype, write_shard
from tpu_experiments.data.store.stream import CacheSettings

SEQ_LEN, VOCAB_SIZE, PAD_ID, BATCH = 1024, 32_000, 0, 64
DTYPE = row_dtype(SEQ_LEN, vocab_size=VOCAB_SIZE)
SHARD_ROWS = 10_000
NATURAL = ("ids", "learn", "positions", "segments")
SECONDS_MAKING: list[float] = []
"""What each call of `make_rows` took, which is no part of writing."""


def make_rows(shard: int) -> Rows:
    """Rows as packing makes them: segments of 200 tokens on average, every fourth row with padding."""
    started = time.perf_counter()
    generator = np.random.default_rng(shard)
    records = np.zeros(SHARD_ROWS, DTYPE)
    length_N = np.where(generator.random(SHARD_ROWS) < 0.25, generator.integers(900, SEQ_LEN, SHARD_ROWS), SEQ_LEN)
    tokens_NT = np.arange(SEQ_LEN) < length_N[:, None]
    starts_NT = generator.random((SHARD_ROWS, SEQ_LEN), np.float32) < 1 / 200
    starts_NT[:, 0] = True
    learn_NT = (generator.random((SHARD_ROWS, SEQ_LEN), np.float32) < 0.8) & ~starts_NT
    records["ids"] = generator.integers(0, VOCAB_SIZE, (SHARD_ROWS, SEQ_LEN)) * tokens_NT
    records["starts"] = np.packbits(starts_NT & tokens_NT, axis=1)
    records["learn"] = np.packbits(learn_NT & tokens_NT, axis=1)
    records["length"] = length_N
    rows = decode_rows(records, pad_id=PAD_ID)
    SECONDS_MAKING.append(time.perf_counter() - started)
    return rows


class Ours:
    title = "tpu_experiments .npy"
    needs = "tpu_experiments"

    def write(self, folder: str, num_shards: int) -> None:
        os.makedirs(folder, exist_ok=True)
        for shard in range(num_shards):
            write_shard(f"{folder}/{shard:05d}.npy", make_rows(shard), dtype=DTYPE)

    def open(self, folder: str, num_shards: int) -> None:
        shards = [(f"{shard:05d}.npy", SHARD_ROWS) for shard in range(num_shards)]
        cache = CacheSettings(read_ahead_bytes=64 * 2**20)
        self.store = RowStore(folder, shards=shards, seq_len=SEQ_LEN, pad_id=PAD_ID, cache=cache)

    def take(self, index: np.ndarray) -> Rows:
        return self.store.take(index)

    def stream(self, start: int = 0) -> Iterator[Rows]:
        """Batches in order, from row `start`."""
        for first in range(start, self.store.num_rows, BATCH):
            yield self.store.take(slice(first, first + BATCH))

    def open_remote(self, url: str, scratch: str, num_shards: int) -> None:
        self.open(url, num_shards)


class ArrowNatural:
    """datasets: a fixed-size list column for each of the four arrays."""

    title = "Arrow (datasets), four columns"
    needs = "datasets"

    def table(self, rows: Rows) -> Any:
        import pyarrow as pa

        arrays = [rows.ids_NT, rows.learn_NT, rows.positions_NT, rows.segments_NT]
        lists = [pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), SEQ_LEN) for array in arrays]
        return pa.Table.from_arrays(lists, names=list(NATURAL))

    def write(self, folder: str, num_shards: int) -> None:
        import pyarrow as pa

        os.makedirs(folder, exist_ok=True)
        for shard in range(num_shards):
            table = self.table(make_rows(shard))
            with pa.OSFile(f"{folder}/{shard:05d}.arrow", "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
                out.write_table(table, max_chunksize=1000)  # datasets' own size of a record batch

    def open(self, folder: str, num_shards: int) -> None:
        from datasets import Dataset, concatenate_datasets

        parts = [Dataset.from_file(f"{folder}/{shard:05d}.arrow") for shard in range(num_shards)]
        self.data = concatenate_datasets(parts).with_format("numpy")

    def rows(self, batch: dict[str, np.ndarray]) -> Rows:
        types = {"learn": np.bool_}
        return Rows(*(np.asarray(batch[name]).astype(types.get(name, np.int32), copy=False) for name in NATURAL))

    def take(self, index: np.ndarray) -> Rows:
        return self.rows(self.data[index])

    def stream(self, start: int = 0) -> Iterator[Rows]:
        data = self.data.skip(start) if start else self.data
        for batch in data.iter(BATCH):
            yield self.rows(batch)

    def open_remote(self, url: str, scratch: str, num_shards: int) -> None:
        from datasets import load_dataset

        files = [f"{url}/{shard:05d}.arrow" for shard in range(num_shards)]
        self.data = load_dataset("arrow", data_files=files, streaming=True, split="train").with_format("numpy")


class ArrowBinary(ArrowNatural):
    """datasets: one column of our records as bytes."""

    title = "Arrow (datasets), our records as one binary column"

    def table(self, rows: Rows) -> Any:
        import pyarrow as pa

        data = pa.py_buffer(encode_rows(rows, dtype=DTYPE).tobytes())
        column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(DTYPE.itemsize), rows.num_rows, [None, data])
        return pa.Table.from_arrays([column.cast(pa.binary())], names=["row"])

    def open(self, folder: str, num_shards: int) -> None:
        super().open(folder, num_shards)
        self.data = self.data.with_format(None)

    def rows(self, batch: dict[str, Any]) -> Rows:
        return decode_rows(np.frombuffer(b"".join(batch["row"]), DTYPE), pad_id=PAD_ID)

    def open_remote(self, url: str, scratch: str, num_shards: int) -> None:
        super().open_remote(url, scratch, num_shards)
        self.data = self.data.with_format(None)


class ArrayRecord:
    """grain: our records as ArrayRecord entries, one a group, as its documentation advises for random access."""

    title = "ArrayRecord (grain), our records"
    needs = "grain array_record"

    def write(self, folder: str, num_shards: int) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        os.makedirs(folder, exist_ok=True)
        for shard in range(num_shards):
            writer = ArrayRecordWriter(f"{folder}/{shard:05d}.array_record", "group_size:1,uncompressed")
            for record in encode_rows(make_rows(shard), dtype=DTYPE):
                writer.write(record.tobytes())
            writer.close()

    def open(self, folder: str, num_shards: int) -> None:
        from grain.sources import ArrayRecordDataSource

        self.source = ArrayRecordDataSource([f"{folder}/{shard:05d}.array_record" for shard in range(num_shards)])

    def take(self, index: np.ndarray) -> Rows:
        return decode_rows(np.frombuffer(b"".join(self.source.__getitems__(index.tolist())), DTYPE), pad_id=PAD_ID)

    def stream(self, start: int = 0) -> Iterator[Rows]:
        import grain

        # Measured: 18,900 rows/s; with threads 14,300; grain.DataLoader 1,800 (7,300 without threads).
        data = grain.MapDataset.source(self.source).batch(BATCH, batch_fn=b"".join)
        loader = iter(data.to_iter_dataset(grain.ReadOptions(num_threads=0)))
        if start:
            loader.set_state({"next_index": start // BATCH})
        for batch in loader:
            yield decode_rows(np.frombuffer(batch, DTYPE), pad_id=PAD_ID)

    def open_remote(self, url: str, scratch: str, num_shards: int) -> None:
        self.open(url, num_shards)
        self.source[0]


class Mds:
    """MosaicML Streaming: our records as one bytes column."""

    title = "MDS (mosaicml-streaming), our records"
    needs = "mosaicml-streaming"
    options: ClassVar[dict[str, Any]] = {"shuffle": False, "batch_size": BATCH, "num_canonical_nodes": 1}

    def write(self, folder: str, num_shards: int) -> None:
        from streaming import MDSWriter

        with MDSWriter(out=folder, columns={"row": "bytes"}, size_limit=2**26) as writer:
            for shard in range(num_shards):
                for record in encode_rows(make_rows(shard), dtype=DTYPE):
                    writer.write({"row": record.tobytes()})

    def open(self, folder: str, num_shards: int) -> None:
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        self.data = StreamingDataset(local=folder, **self.options)

    def take(self, index: np.ndarray) -> Rows:
        parts = [self.data[i]["row"] for i in index.tolist()]
        return decode_rows(np.frombuffer(b"".join(parts), DTYPE), pad_id=PAD_ID)

    def stream(self, start: int = 0) -> Iterator[Rows]:
        if start:
            state = {"epoch": 0, "sample_in_epoch": start, "num_canonical_nodes": 1, "shuffle_seed": 9176}
            self.data.load_state_dict({**state, "initial_physical_nodes": 1})
        parts = []
        for sample in self.data:
            parts.append(sample["row"])
            if len(parts) == BATCH:
                yield decode_rows(np.frombuffer(b"".join(parts), DTYPE), pad_id=PAD_ID)
                parts = []

    def open_remote(self, url: str, scratch: str, num_shards: int) -> None:
        import google.auth
        from google.auth.credentials import AnonymousCredentials
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        google.auth.default = lambda *_, **__: (AnonymousCredentials(), "emulator")
        clean_stale_shared_memory()
        self.data = StreamingDataset(remote=url, local=str(Path(scratch) / "mds"), **self.options)


FORMATS = {"ours": Ours, "arrow": ArrowNatural, "arrow_binary": ArrowBinary, "array_record": ArrayRecord, "mds": Mds}
