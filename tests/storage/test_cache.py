import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.folders import cache_folder
from tpu_experiments.storage.cache import KEPT_SECONDS, FileCache


def filling(data: bytes) -> Callable[[BinaryIO], object]:
    return lambda file: file.write(data)


def names(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != ".lock")


def make_old(file: Path, *, seconds: float) -> None:
    last_use = time.time() - seconds
    os.utime(file, (last_use, last_use))


def test_add_and_read(tmp_path: Path) -> None:
    cache = FileCache(str(tmp_path / "new" / "folder"), max_bytes=100)
    assert cache.read("a", [(0, 1)], size=5) is None
    assert not cache.holds("a", size=5)
    assert cache.add("a", size=5, fill=filling(b"01234"))
    assert cache.read("a", [(3, 5), (0, 1), (2, 2)], size=5) == [b"34", b"0", b""]
    assert cache.add("a", size=5, fill=filling(b"again"))
    assert cache.read("a", [(0, 5)], size=5) == [b"01234"]


def test_a_file_of_another_size_is_removed(tmp_path: Path) -> None:
    cache = FileCache(str(tmp_path), max_bytes=100)
    cache.add("a", size=5, fill=filling(b"01234"))
    (tmp_path / "a").write_bytes(b"01")
    assert cache.read("a", [(0, 1)], size=5) is None
    assert names(tmp_path) == []


def test_the_least_recently_read_file_makes_way(tmp_path: Path) -> None:
    cache = FileCache(str(tmp_path), max_bytes=10)
    for age, name in enumerate("abc"):
        cache.add(name, size=3, fill=filling(b"123"))
        make_old(tmp_path / name, seconds=KEPT_SECONDS + 100 * (3 - age))
    cache.read("a", [(0, 1)], size=3)
    assert cache.add("d", size=4, fill=filling(b"1234"))
    assert names(tmp_path) == ["a", "c", "d"]


def test_what_is_in_use_stays(tmp_path: Path) -> None:
    cache = FileCache(str(tmp_path), max_bytes=10)
    cache.add("a", size=6, fill=filling(b"123456"))
    assert not cache.add("b", size=6, fill=filling(b"123456"))
    assert names(tmp_path) == ["a"]
    make_old(tmp_path / "a", seconds=KEPT_SECONDS + 1)
    assert cache.add("b", size=6, fill=filling(b"123456"))
    assert names(tmp_path) == ["b"]


def test_a_file_larger_than_the_bound_removes_nothing(tmp_path: Path) -> None:
    cache = FileCache(str(tmp_path), max_bytes=10)
    cache.add("a", size=6, fill=filling(b"123456"))
    make_old(tmp_path / "a", seconds=KEPT_SECONDS + 1)
    assert not cache.add("b", size=11, fill=filling(b"12345678901"))
    assert names(tmp_path) == ["a"]


def test_a_file_counts_while_it_is_written(tmp_path: Path) -> None:
    cache = FileCache(str(tmp_path), max_bytes=10)
    seen = []

    def fill(file: BinaryIO) -> None:
        seen.append(cache.add("b", size=5, fill=filling(b"12345")))
        seen.append(cache.add("a", size=6, fill=filling(b"other!")))  # by somebody else, at this moment
        seen.append(cache.read("a", [(0, 1)], size=6))
        seen.append(cache.add("c", size=4, fill=filling(b"1234")))
        file.write(b"123456")

    assert cache.add("a", size=6, fill=fill)
    assert seen == [False, False, None, True]
    assert names(tmp_path) == ["a", "c"]
    assert cache.read("a", [(0, 6)], size=6) == [b"123456"]


def test_a_failed_fill_leaves_nothing(tmp_path: Path) -> None:
    cache = FileCache(str(tmp_path), max_bytes=10)

    def fill(file: BinaryIO) -> None:
        file.write(b"12")
        raise ConfigError("the network; is gone; wait.")

    with pytest.raises(ConfigError, match="the network"):
        cache.add("a", size=6, fill=fill)
    assert names(tmp_path) == []
    assert cache.add("a", size=6, fill=filling(b"123456"))


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    program = (
        "import os, sys; from tpu_experiments.storage.cache import FileCache; "
        "FileCache(sys.argv[1], max_bytes=10).add('a', size=6, fill=lambda file: os.kill(os.getpid(), 9))"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == -9
    assert names(tmp_path) == ["a.tmp"]
    assert FileCache(str(tmp_path), max_bytes=10).add("b", size=8, fill=filling(b"12345678"))
    assert names(tmp_path) == ["b"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="local copies cannot be kept there"):
        FileCache(str(tmp_path / "file" / "x"), max_bytes=1)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder("shards") == "/x/tpu_experiments/shards"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder("shards") == "/home/me/.cache/tpu_experiments/shards"
