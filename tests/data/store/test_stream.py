"""Shards behind memory:// and gs://; what a local folder and every folder have in common is in test_shards.py."""

import logging
import os
import pickle
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from gcp_storage_emulator.server import create_server
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.row_samples import assert_same, random_rows
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.store import stream
from tpu_experiments.data.store.shards import RowStore, row_dtype, write_shard
from tpu_experiments.data.store.stream import CacheSettings, RemoteShards
from tpu_experiments.storage import paths

SEQ_LEN = 16
DTYPE = row_dtype(SEQ_LEN, vocab_size=1000)
COUNTS = (50, 30, 1, 40)
NUM_ROWS = sum(COUNTS)
ROWS = random_rows(NUM_ROWS, seq_len=SEQ_LEN)
HEADER_BYTES = 192
DATA_BYTES = NUM_ROWS * DTYPE.itemsize + len(COUNTS) * HEADER_BYTES


@pytest.fixture
def folder() -> str:
    return write_to(f"memory://{uuid.uuid4().hex}")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket in this process that other processes reach as well."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket="bkt")
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        yield "gs://bkt"
    server.stop()


def write_to(folder: str) -> str:
    ends = np.cumsum(COUNTS)
    for number, end in enumerate(ends.tolist()):
        part = ROWS.take(slice(end - COUNTS[number], end))
        write_shard(paths.join(folder, f"{number}.npy"), part, dtype=DTYPE)
    return folder


def open_store(folder: str, **options: object) -> RowStore:
    shards = [(f"{number}.npy", count) for number, count in enumerate(COUNTS)]
    return RowStore(folder, shards=shards, seq_len=SEQ_LEN, pad_id=3, **options)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[paths.Range]:
    """The ranges that were read."""
    read, asked = paths._read_once, []

    def read_once(pieces: list[paths.Range]) -> object:
        asked.extend(pieces)
        return read(pieces)

    monkeypatch.setattr(paths, "_read_once", read_once)
    return asked


def until(condition: Callable[[], object], *, seconds: float = 20) -> None:
    """Wait for a background thread."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def copies_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.npy"))


def test_a_bucket(bucket, tmp_path):
    folder = write_to(f"{bucket}/prepared")
    store = open_store(folder, cache=CacheSettings(folder=str(tmp_path)))
    order = np.random.default_rng(1).permutation(NUM_ROWS)
    for start in range(0, NUM_ROWS, 16):
        assert_same(store.take(slice(start, start + 16)), ROWS.take(slice(start, start + 16)))
        assert_same(store.take(order[start : start + 16]), ROWS.take(order[start : start + 16]))
    until(lambda: len(copies_in(tmp_path)) == 4)
    store.close()


def test_a_stream_is_read_once_and_ahead(folder, asked):
    store = open_store(folder, cache=CacheSettings(read_ahead_bytes=40 * DTYPE.itemsize))  # 8 blocks of 5 rows
    for start in range(0, NUM_ROWS, 7):
        assert_same(store.take(slice(start, start + 7)), ROWS.take(slice(start, start + 7)))
        if start == 7:
            until(lambda: len(asked) > 8)  # 3 blocks were needed
    data = [piece for piece in asked if piece[1] >= HEADER_BYTES]
    assert sum(stop - start for _, start, stop in data) == NUM_ROWS * DTYPE.itemsize
    assert len(set(data)) == len(data) == 10 + 6 + 1 + 8
    store.close()


def test_one_look_reads_no_more_than_one_block(folder, asked):
    store = open_store(folder, cache=CacheSettings(read_ahead_bytes=40 * DTYPE.itemsize))
    store.take(slice(12, 13))
    assert [stop - start for _, start, stop in asked[1:]] == [5 * DTYPE.itemsize]
    store.close()


def test_a_stream_holds_no_more_than_its_bound(folder):
    store = open_store(folder, cache=CacheSettings(read_ahead_bytes=40 * DTYPE.itemsize))
    for start in [*range(0, NUM_ROWS, 3), 0, 60, 3]:
        store.take(slice(start, start + 3))
        blocks = store._opened._ahead._blocks
        assert sum(len(block.result()) for block in blocks.values()) <= 40
    store.close()


@settings(deadline=None, max_examples=20)
@given(start=st.integers(0, NUM_ROWS - 1), size=st.integers(1, 40), share=st.integers(1, 4), ahead=st.integers(1, 200))
def test_resuming_anywhere_equals_no_stop(start, size, share, ahead):
    folder = f"memory://{DTYPE.itemsize}_resume"
    if not paths.exists(folder):
        write_to(folder)
    store = open_store(folder, cache=CacheSettings(read_ahead_bytes=ahead * DTYPE.itemsize))
    for first in range(start, NUM_ROWS, size * share):
        assert_same(store.take(slice(first, first + size)), ROWS.take(slice(first, first + size)))
    store.close()


def test_random_rows_come_from_copies_once_they_are_there(folder, asked, tmp_path):
    store = open_store(folder, cache=CacheSettings(folder=str(tmp_path), max_bytes=DATA_BYTES))
    index = np.array([120, 3, 80, 3, 50])
    assert_same(store.take(index), ROWS.take(index))
    until(lambda: len(copies_in(tmp_path)) == 4)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) == DATA_BYTES
    paths.remove_tree(folder)
    asked.clear()
    assert_same(store.take(index), ROWS.take(index))
    assert asked == []
    store.close()


@pytest.mark.parametrize("settings", [{"max_bytes": DATA_BYTES - 1}, {"folder": None}])
def test_without_room_for_all_rows_are_fetched_one_by_one(settings, folder, asked, tmp_path):
    store = open_store(folder, cache=CacheSettings(**{"folder": str(tmp_path), **settings}))
    index = np.array([120, 3, 80])
    assert_same(store.take(index), ROWS.take(index))
    assert [stop - start for _, start, stop in asked[1:]] == [DTYPE.itemsize] * 3
    time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
    store.close()


def test_copies_wait_for_room(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "COPY_AGAIN_SECONDS", 0.01)
    other = tmp_path / "other.npy"
    other.write_bytes(b"x" * 2000)
    bound = DATA_BYTES + 100
    store = open_store(folder, cache=CacheSettings(folder=str(tmp_path), max_bytes=bound))
    index = np.array([120, 3, 80])
    store.take(index)
    until(lambda: len(copies_in(tmp_path)) > 2)
    assert other.exists()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= bound
    os.utime(other, (0, 0))
    until(lambda: not other.exists())
    until(lambda: len(copies_in(tmp_path)) == 4)
    assert_same(store.take(index), ROWS.take(index))
    store.close()


def test_a_damaged_copy_is_not_read(folder, tmp_path):
    store = open_store(folder, cache=CacheSettings(folder=str(tmp_path)))
    index = np.array([120, 3, 80])
    store.take(index)
    until(lambda: len(copies_in(tmp_path)) == 4)
    for copy in copies_in(tmp_path):
        copy.write_bytes(copy.read_bytes()[:-1])
    assert_same(store.take(index), ROWS.take(index))
    assert len(copies_in(tmp_path)) == 1  # the shard of one row, of which none was asked for
    store.close()


def test_a_copy_is_compared_with_its_hash(folder, tmp_path):
    store = open_store(folder, cache=CacheSettings(folder=str(tmp_path)), sha256={"1.npy": "0" * 64})
    with pytest.raises(ConfigError, match=r"1\.npy; the shard's sha256 is .*, its manifest says 0000"):
        until(lambda: store.take(np.array([120, 3, 80])).num_rows == 0)
    assert not list(tmp_path.glob("*.tmp"))
    store.close()


def test_a_copy_that_cannot_be_made_stops_nothing(folder, tmp_path, monkeypatch, caplog):
    store = open_store(folder, cache=CacheSettings(folder=str(tmp_path / "cache")))
    monkeypatch.setattr(RemoteShards, "_fill", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    index = np.array([120, 3, 80])
    store.take(index)
    until(lambda: len(caplog.messages) == 4)
    assert all(message.endswith("could not be cached: no space left") for message in caplog.messages)
    assert_same(store.take(index), ROWS.take(index))
    store.close()


def test_a_read_ahead_that_failed_is_an_error_and_tried_again(folder, monkeypatch):
    monkeypatch.setattr(paths, "WAITS_SECONDS", (0.01,))
    store = open_store(folder, cache=CacheSettings(read_ahead_bytes=40 * DTYPE.itemsize))
    store.take(slice(0, 5))
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "cat_file", lambda *_: (_ for _ in ()).throw(ConnectionResetError("gone")))
        with pytest.raises(
            ConfigError, match=r"0\.npy; bytes .* cannot be read in 2 tries: ConnectionResetError: gone"
        ):
            store.take(slice(5, 10))
    assert_same(store.take(slice(5, 10)), ROWS.take(slice(5, 10)))
    store.close()


READER = """
import sys, pickle, numpy as np
from pathlib import Path
store, rows, cache = pickle.loads(Path(sys.argv[1]).read_bytes())
generator = np.random.default_rng(int(sys.argv[2]))
while len(list(Path(cache).glob("*.npy"))) < 4:
    index = generator.integers(0, rows.num_rows, 8)
    assert np.array_equal(store.take(index).ids_NT, rows.ids_NT[index])
index = generator.permutation(rows.num_rows)
assert np.array_equal(store.take(index).segments_NT, rows.segments_NT[index])
print("done")
"""


def test_processes_share_the_copies(bucket, tmp_path):
    cache = tmp_path / "cache"
    store = open_store(write_to(f"{bucket}/shared"), cache=CacheSettings(folder=str(cache), max_bytes=DATA_BYTES))
    (tmp_path / "store").write_bytes(pickle.dumps((store, ROWS, str(cache))))
    command = [sys.executable, "-c", READER, str(tmp_path / "store")]
    readers = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) for i in "01"
    ]
    sizes = []
    while any(reader.poll() is None for reader in readers):
        sizes.append(total_bytes(cache))
        time.sleep(0.005)
    assert [reader.communicate()[0] for reader in readers] == [b"done\n"] * 2
    assert max(sizes) <= DATA_BYTES
    assert len(copies_in(cache)) == 4
    assert sorted(file.name for file in cache.iterdir() if file.suffix != ".npy") == [".lock"]


def total_bytes(folder: Path) -> int:
    """Sum over the files that are there at one moment; a file may be renamed while they are listed."""
    inodes = {}
    for file in folder.glob("*"):
        try:
            status = file.stat()
        except FileNotFoundError:
            continue
        inodes[status.st_ino] = status.st_size
    return sum(inodes.values())


def test_nothing_keeps_python_from_exiting(tmp_path):
    program = """
import time
import numpy as np
from fsspec.implementations.memory import MemoryFileSystem
from tests.data.store.test_stream import CacheSettings, open_store, write_to
store = open_store(write_to("memory://exit"), cache=CacheSettings(folder=%r, read_ahead_bytes=2000))
store.take(slice(0, 1))
MemoryFileSystem.cat_file = lambda *_: time.sleep(100)
store._opened._copies and store._opened._start_copying()
store._opened._ahead._start(5)
print("end")
"""
    environment = os.environ | {"PYTHONWARNINGS": "error::ResourceWarning"}
    done = subprocess.run(
        [sys.executable, "-c", program % str(tmp_path)],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == (b"end\n", b"")
