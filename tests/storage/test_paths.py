"""Every function of storage/paths.py on the local disk and on fsspec's memory://."""

import uuid
from pathlib import Path

import pytest

from tpu_experiments.storage import paths


@pytest.fixture(params=["local", "memory"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path)
    return f"memory://{uuid.uuid4().hex}"


def test_join_keeps_the_scheme() -> None:
    assert paths.join("gs://bucket/exp/", "run", "a.json") == "gs://bucket/exp/run/a.json"
    assert paths.join("gs://bucket") == "gs://bucket"
    assert paths.join("outputs", "run", "a.json") == "outputs/run/a.json"


@pytest.mark.parametrize(
    ("path", "remote"), [("gs://b/x", True), ("memory://x", True), ("outputs/x", False), ("file:///tmp/x", False)]
)
def test_is_remote(path: str, remote: bool) -> None:
    assert paths.is_remote(path) is remote


def test_write_read_list_remove(base: str) -> None:
    folder = paths.join(base, "run")
    assert not paths.exists(folder)
    assert paths.list_names(folder) == []
    paths.make_dirs(folder)
    paths.write_text_atomic(paths.join(folder, "b.txt"), "Dunărea\n")
    paths.write_bytes_atomic(paths.join(folder, "a.bin"), b"\x00\xff")
    paths.make_dirs(paths.join(folder, "sub"))
    paths.write_bytes_atomic(paths.join(folder, "sub", "c"), b"c")
    assert paths.list_names(folder) == ["a.bin", "b.txt", "sub"]
    assert paths.read_text(paths.join(folder, "b.txt")) == "Dunărea\n"
    assert paths.read_bytes(paths.join(folder, "a.bin")) == b"\x00\xff"
    assert paths.exists(folder)
    paths.remove_tree(paths.join(folder, "a.bin"))
    assert paths.list_names(folder) == ["b.txt", "sub"]
    paths.remove_tree(folder)
    assert not paths.exists(folder)
    paths.remove_tree(folder)  # again: nothing there is fine


def test_a_missing_file_is_an_error(base: str) -> None:
    with pytest.raises(FileNotFoundError):
        paths.read_bytes(paths.join(base, "nothing"))


def test_write_replaces(base: str) -> None:
    path = paths.join(base, "x")
    paths.write_text_atomic(path, "a long old text")
    paths.write_text_atomic(path, "new")
    assert paths.read_text(path) == "new"


def test_copy_file(base: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"1" * 100_000)
    destination = paths.join(base, "copy")
    paths.copy_file(str(source), destination)
    assert paths.read_bytes(destination) == source.read_bytes()
    with pytest.raises(FileNotFoundError):
        paths.copy_file(str(tmp_path / "nothing"), paths.join(base, "other"))
    assert not paths.exists(paths.join(base, "other"))


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_no_other(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    paths.write_text_atomic(str(path), "old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(paths.os, failing, fail)
    with pytest.raises(OSError, match="disk full"):
        paths.write_text_atomic(str(path), "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert paths.list_names(str(tmp_path)) == ["x"]


def test_a_written_file_has_the_permissions_of_an_ordinary_one(tmp_path: Path) -> None:
    (tmp_path / "ordinary").write_text("")
    paths.write_text_atomic(str(tmp_path / "x"), "")
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_the_name_of_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(NotADirectoryError):
        paths.list_names(str(tmp_path / "x"))
