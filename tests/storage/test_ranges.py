import random
import uuid
from pathlib import Path

import aiohttp
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from gcsfs.retry import HttpError

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.storage import paths

DATA = bytes(range(200))


@pytest.fixture(params=["local", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    base = str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}"
    file = paths.join(base, "a.bin")
    paths.write_bytes_atomic(file, DATA)
    return file


def failing(error: Exception, *, times: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Let the first reads of memory:// fail; the ranges that were asked for, in order."""
    read, asked = MemoryFileSystem.cat_file, []

    def cat_file(self: MemoryFileSystem, key: str, start: int, end: int) -> bytes:
        asked.append((start, end))
        if len(asked) <= times:
            raise error
        return bytes(read(self, key, start, end))

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    return asked


@pytest.fixture
def remote() -> str:
    file = f"memory://{uuid.uuid4().hex}/a.bin"
    paths.write_bytes_atomic(file, DATA)
    return file


def test_ranges(path: str) -> None:
    assert paths.size_of(path) == 200
    assert paths.read_range(path, 3, 9) == DATA[3:9]
    assert paths.read_ranges([(path, 150, 200), (path, 0, 1), (path, 7, 7)]) == [DATA[150:], DATA[:1], b""]
    assert paths.read_ranges([]) == []


@pytest.mark.parametrize(("gap", "joined"), [(0, 15), (1, 14), (5, 8)])
def test_near_ranges_are_one_request(remote: str, gap: int, joined: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "GAP_BYTES", gap)
    monkeypatch.setattr(paths, "JOINED_BYTES", 60)
    asked = failing(ValueError(), times=0, monkeypatch=monkeypatch)
    draw = random.Random(1)
    starts = [draw.randrange(190) for _ in range(30)]
    pieces = [(remote, start, start + draw.randrange(10)) for start in starts]
    assert paths.read_ranges(pieces) == [DATA[start:stop] for _, start, stop in pieces]
    assert len(asked) == joined
    pieces += [(remote, 3, 150), (remote, 3, 170)]  # two that overlap and are longer than what is joined
    assert paths.read_ranges(pieces) == [DATA[start:stop] for _, start, stop in pieces]


def test_a_missing_file(path: str) -> None:
    assert paths.size_of(path + "x") is None
    with pytest.raises(ConfigError, match=r"a\.binx; there is no such file"):
        paths.read_range(path + "x", 0, 1)


def test_a_file_that_ends_early(path: str) -> None:
    with pytest.raises(ConfigError, match="ends at byte 200 where 300 bytes are expected"):
        paths.read_range(path, 100, 300)


@pytest.mark.parametrize(
    "error", [HttpError({"code": 429}), HttpError({"code": 503}), ConnectionResetError(), aiohttp.ClientError()]
)
def test_a_passing_error_is_tried_again(error: Exception, remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "GAP_BYTES", -1)
    asked, waited = failing(error, times=3, monkeypatch=monkeypatch), []
    assert paths.read_ranges([(remote, 0, 5), (remote, 5, 9)], wait=waited.append) == [DATA[:5], DATA[5:9]]
    assert asked == [(0, 5), (5, 9), (0, 5), (5, 9), (0, 5)]
    assert [round(seconds / 2**i) for i, seconds in enumerate(waited)] == [1, 1]


def test_tries_come_to_an_end(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    failing(HttpError({"code": 503, "message": "slow down"}), times=99, monkeypatch=monkeypatch)
    with pytest.raises(ConfigError, match=r"bytes 0 to 5 cannot be read in 6 tries: HttpError: slow down, 503; check"):
        paths.read_range(remote, 0, 5, wait=waited.append)
    assert len(waited) == 5
    assert 20 < sum(waited) < 40


@pytest.mark.parametrize("error", [HttpError({"code": 401}), OSError("Forbidden: b/o"), PermissionError(), TypeError()])
def test_a_lasting_error_is_not_tried_again(error: Exception, remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = failing(error, times=99, monkeypatch=monkeypatch)
    with pytest.raises(ConfigError, match="cannot be read: "):
        paths.read_range(remote, 0, 5)
    assert len(asked) == 1


def test_whoever_waits_can_stop_the_tries(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = failing(ConnectionResetError(), times=99, monkeypatch=monkeypatch)
    with pytest.raises(ConfigError, match="reading was stopped"):
        paths.read_range(remote, 0, 5, wait=lambda seconds: True)
    assert len(asked) == 1


def test_the_size_is_asked_for_again(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    info, errors, waited = MemoryFileSystem.info, [HttpError({"code": 429}), TimeoutError()], []

    def failing_info(self: MemoryFileSystem, key: str) -> object:
        if errors:
            raise errors.pop()
        return info(self, key)

    monkeypatch.setattr(MemoryFileSystem, "info", failing_info)
    assert paths.size_of(remote, wait=waited.append) == 200
    assert waited == [1, 2]
    errors.append(HttpError({"code": 401, "message": "who are you"}))
    with pytest.raises(ConfigError, match="the size cannot be read: HttpError: who are you, 401; check the network"):
        paths.size_of(remote)
