import collections
import hashlib
import itertools
import os
import tempfile
import tracemalloc

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.store.mixing import measure_mixing
from tpu_experiments.data.rows import Rows
from tpu_experiments.data.store import shuffle
from tpu_experiments.data.store.shards import decode_rows, row_dtype, write_shard
from tpu_experiments.data.store.shuffle import read_origins, write_epoch

SEQ_LEN = 4
DTYPE = row_dtype(SEQ_LEN, vocab_size=2**20)


def rows_of(first, count):
    """Rows whose ids are all the row's own number; every third ends in padding."""
    numbers_N = np.arange(first, first + count, dtype=np.int32)
    positions_NT = np.tile(np.arange(SEQ_LEN, dtype=np.int32), (count, 1))
    tokens_NT = positions_NT < np.where(numbers_N % 3 == 0, SEQ_LEN - 1, SEQ_LEN)[:, None]
    ids_NT = np.broadcast_to(numbers_N[:, None], positions_NT.shape)
    return Rows(
        ids_NT * tokens_NT, tokens_NT & (positions_NT > 0), positions_NT * tokens_NT, tokens_NT.astype(np.int32)
    )


def parts_of(sizes):
    return [rows_of(int(first), size) for first, size in zip(np.cumsum([0, *sizes]), sizes, strict=False)]


def written(
    folder, sizes, *, seed=0, stage_index=0, epoch=0, passes=2, block_rows=16, rows_per_shard=8, parts=None, **more
):
    parts = parts or parts_of(sizes)
    order = {"seed": seed, "stage_index": stage_index, "epoch": epoch, "passes": passes}
    shape = {"block_rows": block_rows, "rows_per_shard": rows_per_shard, "dtype": DTYPE}
    return write_epoch(parts, folder=str(folder), **order, **shape, **more)


def read(folder, shards):
    """Origins and rows of an epoch, in order."""
    parts = [decode_rows(np.load(f"{folder}/{shard['name']}"), pad_id=0) for shard in shards]
    return read_origins(str(folder), shards=shards), Rows.concatenate(parts)


def same(a, b):
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in Rows.__dataclass_fields__)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any),
    passes=st.integers(1, 4),
    block_rows=st.integers(1, 50),
    rows_per_shard=st.integers(1, 50),
    seed=st.integers(-(2**63), 2**64),
)
def test_every_row_is_written_once_with_its_origin(tmp_path_factory, sizes, passes, block_rows, rows_per_shard, seed):
    folder = tmp_path_factory.mktemp("epoch")
    shape = {"passes": passes, "block_rows": block_rows, "rows_per_shard": rows_per_shard}
    shards = written(folder, sizes, seed=seed, **shape)
    origins, rows = read(folder, shards)
    assert sorted(origins.tolist()) == list(range(sum(sizes)))
    assert same(rows, Rows.concatenate(parts_of(sizes)).take(origins))
    assert max(shard["rows"] for shard in shards) <= min(rows_per_shard, block_rows)
    assert [len(np.load(folder / shard["origins"])) for shard in shards] == [shard["rows"] for shard in shards]
    assert {entry.name for entry in folder.iterdir()} == {s[key] for s in shards for key in ("name", "origins")}
    shards_again = written(tmp_path_factory.mktemp("again"), sizes, seed=seed, **shape)
    assert shards_again == shards  # with the hashes of all bytes


def test_the_records_name_the_bytes(tmp_path):
    shards = written(tmp_path, (10, 30))
    assert [shard["rows"] for shard in shards] == [8, 8, 8, 8, 8]
    for shard, (name, digest) in itertools.product(shards, [("name", "sha256"), ("origins", "origins_sha256")]):
        assert hashlib.sha256((tmp_path / shard[name]).read_bytes()).hexdigest() == shard[digest]


def test_shards_of_one_block_are_of_like_size(tmp_path):
    shards = written(tmp_path, (40,), block_rows=30, rows_per_shard=20)
    assert [shard["rows"] for shard in shards] == [15, 15, 10]


def test_no_rows_give_no_shards(tmp_path):
    assert written(tmp_path, (0, 0), passes=3) == []
    assert read_origins(str(tmp_path), shards=[]).tolist() == []


def test_seed_stage_epoch_and_passes_each_change_the_order(tmp_path):
    keys = [{}, {"seed": 1}, {"stage_index": 1}, {"epoch": 1}, {"passes": 1}, {"passes": 3}]
    folders = [(tmp_path / str(number), key) for number, key in enumerate(keys)]
    orders = [tuple(read(folder, written(folder, (30, 20), **key))[0].tolist()) for folder, key in folders]
    assert len(set(orders)) == len(keys)


def test_two_passes_make_every_order_equally_likely(tmp_path):
    """Rows 0, 1 | 2, 3 in blocks of two: 24 orders, chi-square with 23 degrees of freedom."""
    draws = 1200
    counts = collections.Counter()
    inputs = [shuffle._Source(rows_of(0, 4), first=0, dtype=DTYPE)]
    for seed in range(draws):
        passes = shuffle._Shuffle((seed, 0, 0), block_rows=2, dtype=DTYPE)
        with (tmp_path / "scratch").open("w+b") as file:
            blocks = passes.blocks(passes.rewrite(inputs, number=1, file=file), number=2)
            counts[tuple(origin for block in blocks for origin in block["origin"].tolist())] += 1
    assert len(counts) == 24
    statistic = sum((count - draws / 24) ** 2 / (draws / 24) for count in counts.values())
    assert statistic < 49.7  # the 99.9 % point


def test_one_pass_mixes_sources_and_two_mix_rows(tmp_path):
    sizes = (6000, 3000, 1000)
    found = {}
    for passes in (1, 2, 3):
        folder = tmp_path / str(passes)
        shards = written(folder, sizes, passes=passes, block_rows=500, rows_per_shard=500)
        found[passes] = measure_mixing(
            read_origins(str(folder), shards=shards), sizes=sizes, batch_rows=50, near_rows=500
        )
    assert found[1].source_correlation > 0.99
    assert found[1].near_pairs > 3
    for passes, mixing in found.items():
        assert mixing.source_spread == pytest.approx(1, abs=0.15), passes
    for passes in (2, 3):
        assert found[passes].displacement == pytest.approx(1, abs=0.04)
        assert found[passes].source_correlation == pytest.approx(0, abs=0.05)
        assert found[passes].near_pairs == pytest.approx(1, abs=0.15)
        assert found[passes].neighbours_together == pytest.approx(1, abs=0.6)


def test_too_many_blocks_share_inputs(tmp_path, monkeypatch):
    monkeypatch.setattr(shuffle, "MAX_INPUTS", 3)
    origins, _ = read(tmp_path, written(tmp_path, (50,), block_rows=5))
    assert sorted(origins.tolist()) == list(range(50))
    inputs = [shuffle._Source(rows_of(0, 50), first=0, dtype=DTYPE)]
    with (tmp_path / "scratch").open("w+b") as file:
        made = shuffle._Shuffle((0, 0, 0), block_rows=5, dtype=DTYPE).rewrite(inputs, number=1, file=file)
    assert [part.num_rows for part in made] == [20, 20, 10]


class WatchedRows:
    """Rows that note every slice that is read."""

    seq_len = SEQ_LEN

    def __init__(self, rows):
        self.rows = rows
        self.num_rows = rows.num_rows
        self.read = []

    def take(self, index_M):
        self.read.append((index_M.start, index_M.stop))
        return self.rows.take(index_M)


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_sources_are_read_once_from_start_to_end_in_bounded_pieces(tmp_path, monkeypatch, passes):
    monkeypatch.setattr(shuffle, "READ_TOKENS", 7 * SEQ_LEN)
    parts = [WatchedRows(part) for part in parts_of((200, 90, 0))]
    written(tmp_path, None, parts=parts, passes=passes, block_rows=32)
    for part in parts:
        assert [start for start, _ in part.read] == [0, *(stop for _, stop in part.read)][:-1]
        assert sum(stop - start for start, stop in part.read) == part.num_rows
        assert max((stop - start for start, stop in part.read), default=0) <= 7


def array_bytes():
    """Bytes of numpy arrays that were made since tracemalloc started."""
    snapshot = tracemalloc.take_snapshot()
    own = snapshot.filter_traces([tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)])
    return sum(trace.size for trace in own.traces)


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_memory_is_a_block_and_a_shard_whatever_the_rows(tmp_path, monkeypatch, passes):
    monkeypatch.setattr(shuffle, "READ_TOKENS", 100 * SEQ_LEN)
    sizes, block_rows, alive = (6_000, 2_000), 1000, []

    class Measured(WatchedRows):
        def take(self, index_M):
            alive.append(array_bytes())
            return super().take(index_M)

    def write(path, rows, *, dtype):
        alive.append(array_bytes())
        return write_shard(path, rows, dtype=dtype)

    monkeypatch.setattr(shuffle, "write_shard", write)
    parts = [Measured(part) for part in parts_of(sizes)]
    tracemalloc.start()
    written(tmp_path, None, parts=parts, passes=passes, block_rows=block_rows, rows_per_shard=block_rows)
    tracemalloc.stop()
    origin, place = 8, 8
    block = block_rows * (DTYPE.itemsize + origin + place)
    shard = block_rows * SEQ_LEN * 13
    assert block < max(alive) < 1.05 * (block + shard)


def test_scratch_files_have_no_name_and_leave_the_disk(tmp_path, monkeypatch):
    """One pass is open while the first is written and while the shards are, and none afterwards."""
    scratch, most = tmp_path / "scratch", []
    scratch.mkdir()

    def open_scratch_files():
        links = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        ]
        return sum(link.startswith(str(scratch)) for link in links)

    class Counting(WatchedRows):
        def take(self, index_M):
            most.append(open_scratch_files())
            return super().take(index_M)

    def write(path, rows, *, dtype):
        most.append(open_scratch_files())
        return write_shard(path, rows, dtype=dtype)

    monkeypatch.setattr(shuffle, "write_shard", write)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    parts = [Counting(rows_of(0, 100))]
    written("memory://shuffle/scratch", None, parts=parts, passes=4)
    fsspec.filesystem("memory").rm("/shuffle", recursive=True)
    assert set(most) == {1}
    assert open_scratch_files() == 0
    assert list(scratch.iterdir()) == []


def test_a_remote_folder(tmp_path):
    folder = "memory://shuffle/epoch"
    shards = written(folder, (20, 5))
    local = written(tmp_path, (20, 5))
    assert shards == local
    assert read_origins(folder, shards=shards).tolist() == read(tmp_path, local)[0].tolist()
    fsspec.filesystem("memory").rm("/shuffle", recursive=True)
