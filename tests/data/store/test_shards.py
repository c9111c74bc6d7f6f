import hashlib
import os
import pickle
import threading
import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.row_samples import assert_same, random_rows
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.batches import StageRows
from tpu_experiments.data.rows import Array, Rows, empty, padding
from tpu_experiments.data.store import stream
from tpu_experiments.data.store.shards import RowStore, decode_rows, encode_rows, row_dtype, verify_shard, write_shard
from tpu_experiments.storage import paths

SEQ_LEN = 13
DTYPE = row_dtype(SEQ_LEN, vocab_size=1000)


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}"


def write(folder: str, rows: Rows, counts: list[int], **settings: object) -> RowStore:
    """`rows` in shards of so many rows, and a store of them."""
    ends = np.cumsum(counts)
    for number, (count, end) in enumerate(zip(counts, ends, strict=True)):
        write_shard(paths.join(folder, f"{number:05d}.npy"), rows.take(slice(int(end) - count, int(end))), dtype=DTYPE)
    shards = [(f"{number:05d}.npy", count) for number, count in enumerate(counts)]
    return RowStore(folder, shards=shards, seq_len=SEQ_LEN, pad_id=3, **settings)


@pytest.mark.parametrize(("vocab_size", "width"), [(2**16, 2), (2**16 + 1, 4)])
def test_the_vocabulary_decides_the_width_of_an_id(vocab_size, width):
    dtype = row_dtype(1024, vocab_size=vocab_size)
    assert dtype.itemsize == 1024 * width + 2 * 128 + 4
    rows = padding(1, seq_len=1024)
    rows.ids_NT[:] = vocab_size - 1
    rows.positions_NT[0] = np.arange(1024)
    rows.segments_NT[:] = 1
    assert_same(decode_rows(encode_rows(rows, dtype=dtype), pad_id=0), rows)


@settings(deadline=None)
@given(
    num_rows=st.integers(0, 6),
    seq_len=st.integers(1, 70),
    vocab_size=st.sampled_from([5, 2**16, 2**31]),
    pad_id=st.sampled_from([0, 3, 2**31 - 1]),
    seed=st.integers(0, 2**32),
)
def test_records_give_the_rows_back(num_rows, seq_len, vocab_size, pad_id, seed):
    rows = random_rows(num_rows, seq_len=seq_len, vocab_size=vocab_size, pad_id=pad_id, seed=seed)
    records = encode_rows(rows, dtype=row_dtype(seq_len, vocab_size=vocab_size))
    assert records.shape == (num_rows,)
    assert_same(decode_rows(records, pad_id=pad_id), rows)


def test_further_arrays_travel_with_their_rows(folder):
    """Through shards, a store, an epoch's order, a process's share and padding; a part without one has zeros."""
    arrays = (Array("label", "int32", per="token"), Array("reference", "float32", per="row"))
    dtype = row_dtype(SEQ_LEN, vocab_size=1000, arrays=arrays)
    assert dtype.itemsize == DTYPE.itemsize + 4 * SEQ_LEN + 4
    rows = random_rows(5, seq_len=SEQ_LEN)
    number_N = np.arange(1, 6, dtype=np.float32)
    rows = replace(rows, more={"label": rows.ids_NT * 2, "reference": number_N / 4})
    write_shard(paths.join(folder, "0.npy"), rows, dtype=dtype)
    store = RowStore(folder, shards=[("0.npy", 5)], seq_len=SEQ_LEN, pad_id=3)
    plain = random_rows(2, seq_len=SEQ_LEN, seed=1)
    batch = StageRows([store, plain], names=["a", "b"], seed=0, stage_index=0).batch(0, global_rows=8, num_total=7)
    assert {name: array.dtype for name, array in batch.more.items()} == {"label": np.int32, "reference": np.float32}
    mine = batch.slice_process(1, 2)
    assert mine.more["label"].shape == (4, SEQ_LEN)
    for place, label in enumerate(batch.labels):
        source, _, number = label.partition(":")
        own = 0.0 if source != "a" else number_N[int(number)] / 4
        assert batch.more["reference"][place] == own
        assert (batch.more["label"][place] == batch.ids_GT[place] * 2 * (source == "a")).all()
    assert (mine.more["reference"] == batch.more["reference"][4:]).all()
    with pytest.raises(ValueError, match=r"rows have \['reference'\], which the shard has no place for"):
        encode_rows(rows, dtype=row_dtype(SEQ_LEN, vocab_size=1000, arrays=arrays[:1]))


def test_many_rows_are_encoded_in_parts():
    rows = random_rows(600, seq_len=SEQ_LEN)
    assert_same(decode_rows(encode_rows(rows, dtype=DTYPE), pad_id=3), rows)
    rows.learn_NT[599] = True
    with pytest.raises(ValueError, match="row 599, column 0 is not valid"):
        encode_rows(rows, dtype=DTYPE)


def full_row() -> Rows:
    rows = padding(1, seq_len=SEQ_LEN)
    rows.positions_NT[0] = np.arange(SEQ_LEN)
    rows.segments_NT[:] = 1
    return rows


@pytest.mark.parametrize(
    ("field", "column", "value"),
    [
        ("segments_NT", 3, 0),  # padding before a token
        ("segments_NT", 12, 2),  # a new segment whose position goes on
        ("segments_NT", 0, 2),
        ("positions_NT", 5, 9),
        ("positions_NT", 5, 0),  # a start without a new segment
        ("learn_NT", 0, True),
    ],
)
def test_invalid_rows_are_refused(field, column, value):
    rows = full_row()
    getattr(rows, field)[0, column] = value
    with pytest.raises(ValueError, match=r"row 0, column .* is not valid"):
        encode_rows(rows, dtype=DTYPE)


@pytest.mark.parametrize("token", [-1, 2**16])
def test_ids_that_do_not_fit_are_refused(token):
    rows = full_row()
    rows.ids_NT[0, 4] = token
    with pytest.raises(ValueError, match="do not fit into 0 to 65535"):
        encode_rows(rows, dtype=DTYPE)


def test_a_shard_is_a_numpy_file(tmp_path):
    rows = random_rows(9, seq_len=SEQ_LEN)
    path = tmp_path / "a.npy"
    record = write_shard(str(path), rows, dtype=DTYPE)
    data = path.read_bytes()
    digests = {"sha256": hashlib.sha256(data).hexdigest(), "md5": hashlib.md5(data).hexdigest()}
    assert record == {"name": "a.npy", "rows": 9, "bytes": len(data), **digests}
    mapped = np.load(path, mmap_mode="r")
    assert mapped["length"].tolist() == (rows.segments_NT > 0).sum(axis=1).tolist()
    assert write_shard(str(tmp_path / "b.npy"), rows, dtype=DTYPE)["sha256"] == record["sha256"]
    assert sorted(os.listdir(tmp_path)) == ["a.npy", "b.npy"]


def test_verify(folder):
    path = paths.join(folder, "a.npy")
    record = write_shard(path, random_rows(9, seq_len=SEQ_LEN), dtype=DTYPE)
    verify_shard(path, record)
    data = paths.read_bytes(path)
    for wrong, message in ((data[:-1], "bytes, its manifest says"), (data[:-1] + b"\xff", "sha256 is")):
        paths.write_bytes_atomic(path, wrong)
        with pytest.raises(ConfigError, match=message):
            verify_shard(path, record)
    paths.remove_tree(path)
    with pytest.raises(ConfigError, match="is missing"):
        verify_shard(path, record)


def test_a_store_takes_what_rows_take(folder):
    rows = random_rows(40, seq_len=SEQ_LEN)
    store = write(folder, rows, [7, 0, 1, 30, 2])
    assert (store.num_rows, store.seq_len) == (40, SEQ_LEN)
    slices = [
        slice(None),
        slice(5, 9),
        slice(30, 99),
        slice(-3, None),
        slice(9, 5),
        slice(0, 40, 7),
        slice(None, None, -1),
    ]
    arrays = [[39, 0, 8, 8, 7, -1], [6], [6, 7, 8], [], np.random.default_rng(0).permutation(40)]
    for index in [*slices, *(np.array(array, np.int64) for array in arrays)]:
        assert_same(store.take(index), rows.take(index))
    store.close()
    assert_same(store.take(slice(0, 3)), rows.take(slice(0, 3)))
    store.close()


def test_a_large_take_is_decoded_in_parts(tmp_path):
    rows = random_rows(2500, seq_len=SEQ_LEN)
    store = write(str(tmp_path), rows, [1200, 1300])
    assert_same(store.take(slice(None)), rows)
    backwards = np.arange(2500)[::-1]
    assert_same(store.take(backwards), rows.take(backwards))


@pytest.mark.parametrize("index", [40, -41])
def test_a_position_outside_is_an_error(folder, index):
    store = write(folder, random_rows(40, seq_len=SEQ_LEN), [40])
    with pytest.raises(IndexError, match="of 40 rows"):
        store.take(np.array([0, index]))


def test_an_empty_store():
    store = RowStore("/nowhere", shards=[], seq_len=5, pad_id=0)
    assert store.num_rows == 0
    assert_same(store.take(slice(None)), empty(5))
    assert_same(store.take(np.array([], np.int64)), empty(5))
    store.close()


def test_an_opened_store_is_pickled_closed(folder):
    rows = random_rows(10, seq_len=SEQ_LEN)
    store = write(folder, rows, [4, 6])
    store.take(slice(0, 1))
    data = pickle.dumps(store)
    assert len(data) < 2000
    again = pickle.loads(data)
    assert_same(again.take(np.array([9, 0])), rows.take(np.array([9, 0])))
    for opened in (store, again):
        opened.close()


def test_threads_share_a_store_of_more_shards_than_maps(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "OPEN_MAPS", 2)
    rows = random_rows(60, seq_len=SEQ_LEN)
    store = write(str(tmp_path), rows, [10] * 6)
    wrong = []

    def take(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for _ in range(50):
            index = generator.integers(0, 60, 8)
            if not np.array_equal(store.take(index).ids_NT, rows.ids_NT[index]):
                wrong.append(index)

    threads = [threading.Thread(target=take, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_shard_is_hashed_once_though_its_map_is_opened_again(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "OPEN_MAPS", 2)
    hashed, require = [], stream.require_sha256_of
    monkeypatch.setattr(
        stream, "require_sha256_of", lambda path, *args, **more: (hashed.append(path), require(path, *args, **more))
    )
    rows = random_rows(30, seq_len=SEQ_LEN)
    names = [f"{number:05d}.npy" for number in range(3)]
    records = [
        write_shard(f"{tmp_path}/{name}", rows.take(slice(10 * n, 10 * n + 10)), dtype=DTYPE)
        for n, name in enumerate(names)
    ]
    store = RowStore.of_records(str(tmp_path), records, seq_len=SEQ_LEN, pad_id=3, check="at_open")
    for _ in range(3):
        for row in (0, 10, 20):
            store.take(np.array([row]))
    assert hashed == [f"{tmp_path}/{name}" for name in names]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # Python 3.12, when there is another thread
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX, where another test of the process imported it
def test_a_forked_process_opens_its_own(folder):
    rows = random_rows(10, seq_len=SEQ_LEN)
    store = write(folder, rows, [4, 6])
    store.take(slice(0, 2))
    store._lock.acquire()  # held by another thread at the fork
    child = os.fork()
    if child == 0:
        same = np.array_equal(store.take(np.array([9, 0])).ids_NT, rows.ids_NT[[9, 0]])
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store._lock.release()
    store.close()


def test_what_the_manifest_does_not_say_is_an_error(folder):
    rows = random_rows(10, seq_len=SEQ_LEN)
    write(folder, rows, [4, 6]).close()
    cases = [
        ([("00000.npy", 5)], SEQ_LEN, "has 4 rows of 13 tokens, its manifest says 5 of 13"),
        ([("00000.npy", 4)], 12, "has 4 rows of 13 tokens, its manifest says 4 of 12"),
        ([("gone.npy", 4)], SEQ_LEN, "there is no such file"),
    ]
    for shards, seq_len, message in cases:
        with pytest.raises(ConfigError, match=message):
            RowStore(folder, shards=shards, seq_len=seq_len, pad_id=0).take(slice(0, 1))
    later = [("00000.npy", 4), ("00001.npy", 7)]
    store = RowStore(folder, shards=later, seq_len=SEQ_LEN, pad_id=0)
    with pytest.raises(ConfigError, match=r"bytes where its rows take|the file ends at byte"):
        store.take(np.array([10, 0]))
    store.close()
    paths.write_bytes_atomic(paths.join(folder, "text.npy"), b"not rows at all")
    with pytest.raises(ConfigError, match=r"text\.npy; it is "):
        RowStore(folder, shards=[("text.npy", 4)], seq_len=SEQ_LEN, pad_id=0).take(slice(0, 1))
