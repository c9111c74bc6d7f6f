"""Unpacking without end: what is whole comes out, and `damage` says where it stopped."""

import bz2
import gzip
import lzma
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpu_experiments.storage.streams import ByteStream, ReadableStream, UnreadableError, open_binary

PACK = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress, "zstandard": zstandard.compress}


def unpacked(path: Path, content: bytes, compression: str | None) -> tuple[bytes, str | None]:
    path.write_bytes(content)
    stream = ByteStream(str(path), compression=compression)
    return b"".join(stream), stream.damage


@pytest.mark.parametrize("compression", PACK)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.binary(max_size=300).map(lambda part: part * 500), min_size=1, max_size=4), data=st.data())
def test_whole_and_cut(tmp_path: Path, compression: str, parts: list[bytes], data: st.DataObject) -> None:
    packed = [PACK[compression](part) for part in parts]
    everything = b"".join(packed)
    assert unpacked(tmp_path / "a", everything, compression) == (b"".join(parts), None)
    cut = data.draw(st.integers(0, len(everything) - 1))
    text, damage = unpacked(tmp_path / "a", everything[:cut], compression)
    assert b"".join(parts).startswith(text)
    ends = [sum(map(len, packed[:number])) for number in range(1, len(packed))]
    assert (damage is None) == (cut in ends), "between two streams nobody can tell"


@pytest.mark.parametrize("compression", PACK)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(min_size=1, max_size=200), data=st.data())
def test_a_damaged_byte_never_raises(tmp_path: Path, compression: str, content: bytes, data: st.DataObject) -> None:
    packed = bytearray(PACK[compression](content * 50))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    unpacked(tmp_path / "a", bytes(packed), compression)


def test_garbage_after_the_end_is_said(tmp_path: Path) -> None:
    text, damage = unpacked(tmp_path / "a", gzip.compress(b"abc") + b"garbage", "gzip")
    assert text == b"abc"
    assert damage is not None
    assert "is damaged after 3 unpacked bytes" in damage
    assert unpacked(tmp_path / "a", gzip.compress(b"abc") + b"\0" * 512, "gzip") == (b"abc", None)


def test_a_bomb_stays_small(tmp_path: Path) -> None:
    """100 MB of zeros in 100 kB: no chunk is more than gzip makes of PACKED_CHUNK_BYTES."""
    (tmp_path / "a").write_bytes(gzip.compress(b"\0" * 100_000_000, 9))
    assert max(map(len, ByteStream(str(tmp_path / "a"), compression="gzip"))) <= 17_000_000


def test_as_a_file_object(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(gzip.compress(b"ab\ncd"))
    assert ReadableStream(ByteStream(str(tmp_path / "a"), compression="gzip")).readlines() == [b"ab\n", b"cd"]


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="FileNotFoundError"):
        open_binary(str(tmp_path / "a"))
    with pytest.raises(UnreadableError, match="IsADirectoryError"):
        open_binary(str(tmp_path))
    with pytest.raises(UnreadableError, match="FileNotFoundError"):
        open_binary("memory://nothing/there")
