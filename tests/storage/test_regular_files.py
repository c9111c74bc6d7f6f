"""What stands in the place of a file: devices, named pipes, sockets, sparse files are refused, and never waited for."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.regular_files import MOST_BYTES, NotRegular, open_regular, require_regular_folder
from tpu_experiments.storage import paths
from tpu_experiments.storage.streams import ByteStream

KINDS = ("pipe", "linked pipe", "zero", "urandom", "full", "null", "tty", "socket")
LARGE = ("sparse", "linked sparse")


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    """Sockets whose names in the file system stay for the test."""
    made: list[socket.socket] = []
    yield made
    for each in made:
        each.close()


def put(place: Path, kind: str, sockets: list[socket.socket]) -> Path:
    """Make something of a kind at a place, instead of a file."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    device = {"zero": "zero", "urandom": "urandom", "full": "full", "null": "null", "tty": "tty"}.get(kind)
    other = place.with_name(f"a_{place.name}")
    if device is not None:
        place.symlink_to(f"/dev/{device}")
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "linked pipe":
        os.mkfifo(other)
        place.symlink_to(other)
    elif kind == "socket":
        made = socket.socket(socket.AF_UNIX)
        here = os.getcwd()
        os.chdir(place.parent)  # a socket's path has at most 107 bytes
        made.bind(place.name)
        os.chdir(here)
        sockets.append(made)
    else:
        target = other if kind == "linked sparse" else place
        with target.open("wb") as file:
            file.truncate(2**40)
        if target is other:
            place.symlink_to(other)
    return place


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_not_opened(kind: str, tmp_path: Path, sockets: list[socket.socket]) -> None:
    place = str(put(tmp_path / "x.jsonl", kind, sockets))
    read = (
        lambda: open_regular(place),
        lambda: paths.read_bytes(place),
        lambda: paths.read_text(f"file://{place}"),
        lambda: paths.read_range(place, 0, 8),
        lambda: list(ByteStream(place)),
        lambda: require_regular_folder(tmp_path, key="model.path=x"),
    )
    for each in read:
        with pytest.raises(
            NotRegular, match=r"x\.jsonl; it is a (device|named pipe|socket), .* only regular files are"
        ):
            each()


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("suffix", [*MOST_BYTES, ".jsonl", ".safetensors", ".txt", ""])
def test_a_file_that_is_read_as_a_whole_has_a_bound(
    suffix: str, kind: str, tmp_path: Path, sockets: list[socket.socket]
) -> None:
    place = put(tmp_path / f"x{suffix}", kind, sockets)
    with pytest.raises(NotRegular, match=r"; it has 1,099,511,627,776 bytes \([0-9,]+ on the disk\), and such a file"):
        paths.read_bytes(str(place))
    if suffix in MOST_BYTES:
        with pytest.raises(NotRegular, match=r"^model.path=x; .* it has 1,099,511,627,776 bytes"):
            require_regular_folder(tmp_path, key="model.path=x")
    assert paths.read_range(str(place), 2**39, 2**39 + 4) == bytes(4), "in pieces it is read"


def test_a_regular_file_and_a_link_to_one_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.json").symlink_to(tmp_path / "a.json")
    (tmp_path / "nowhere.json").symlink_to(tmp_path / "gone")
    (tmp_path / "folder").mkdir()
    require_regular_folder(tmp_path, key="model.path=x")
    assert paths.read_text(str(tmp_path / "b.json")) == "{}"
    with open_regular(tmp_path / "a.json") as file:
        assert file.read() == b"{}"
    for missing, error in (("nowhere.json", FileNotFoundError), ("folder", IsADirectoryError)):
        with pytest.raises(error):
            paths.read_bytes(str(tmp_path / missing))


def test_descriptors_are_closed(tmp_path: Path, sockets: list[socket.socket]) -> None:
    place = put(tmp_path / "x.json", "sparse", sockets)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(ConfigError):
            open_regular(place, most=4)
    assert len(os.listdir("/proc/self/fd")) == before
