"""Byte ranges of files, local or behind an fsspec URL; transient failures of remote reads are retried."""

import bisect
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.io import paths
from tpu_experiments.io.answers import NoAnswer, answered
from tpu_experiments.io.retry import SILENT_TRIES_AGAIN, WAITS_SECONDS, is_transient

Range = tuple[str, int, int]
"""(path or URL, first byte, byte after the last)."""

GAP_BYTES = 2**15
"""Largest gap between two ranges of one request: 0.7 ms at 50 MB/s, where another request takes 20 to 50 ms."""
JOINED_BYTES = 2**23
"""Largest request that joins several ranges; a failed request is repeated as a whole."""


def size_of(path: str, *, wait: Callable[[float], object] = time.sleep) -> int | None:
    """Return the size of a file in bytes; None if there is none.

    Raises:
        ConfigError: it cannot be determined, also after the retries (`WAITS_SECONDS`).
    """
    num_silent = 0
    for num_tries, seconds in enumerate((*WAITS_SECONDS, None), start=1):
        try:
            if not paths.is_remote(path):
                return Path(path.removeprefix("file://")).stat().st_size
            return answered(lambda: _remote_size(path), place=path, operation="look up")
        except FileNotFoundError:
            return None
        except Exception as error:  # file systems and their clients raise types of their own
            num_silent += isinstance(error, NoAnswer)
            if seconds is None or not is_transient(error) or num_silent > SILENT_TRIES_AGAIN:
                raise _lasting_error(path, "the size", error, num_tries=num_tries) from error
        wait(seconds)
    return None


def read_range(path: str, start: int, stop: int, *, wait: Callable[[float], object] = time.sleep) -> bytes:
    """Read bytes `start` to `stop` of a file.

    Raises:
        ConfigError: they cannot be read, also after the retries (`WAITS_SECONDS`), or the file is shorter.
    """
    return read_ranges([(path, start, stop)], wait=wait)[0]


def read_ranges(pieces: Sequence[Range], *, wait: Callable[[float], object] = time.sleep) -> list[bytes]:
    """Read several ranges of files of one file system, concurrently where it supports that.

    Args:
        wait: called with the seconds before a retry; a true result cancels the retries.

    Raises:
        ConfigError: as `read_range`, or `wait` has cancelled the retries.
    """
    found: dict[int, bytes] = {}
    num_silent = 0
    for num_tries, seconds in enumerate((*WAITS_SECONDS, None), start=1):
        missing = [place for place in range(len(pieces)) if place not in found]
        is_silent = False
        for place, got in zip(missing, _read_once([pieces[place] for place in missing]), strict=True):
            is_silent = is_silent or isinstance(got, NoAnswer)
            if isinstance(got, bytes):
                found[place] = _whole(got, pieces[place])
            elif seconds is None or not is_transient(got) or (isinstance(got, NoAnswer) and num_silent > 0):
                path, start, stop = pieces[place]
                raise _lasting_error(path, f"bytes {start:,} to {stop:,}", got, num_tries=num_tries) from got
        if len(found) == len(pieces):
            break
        assert seconds is not None, "the last try raises"
        num_silent += is_silent
        if wait(seconds * random.uniform(0.75, 1.25)):
            raise ConfigError(f"{pieces[0][0]}; reading was stopped while it was tried again.")
    return [found[place] for place in range(len(pieces))]


def _read_once(pieces: Sequence[Range]) -> list[bytes | BaseException]:
    if not pieces:
        return []
    if not paths.is_remote(pieces[0][0]):
        return [_read_local(*piece) for piece in pieces]
    try:
        return answered(lambda: _remote_ranges(pieces), place=pieces[0][0], operation=f"read {len(pieces)} parts")
    except Exception as error:
        return [error] * len(pieces)


def _remote_ranges(pieces: Sequence[Range]) -> list[bytes | BaseException]:
    """Read ranges with nearby ones joined: 256 rows of a small shard are one request, not 256."""
    filesystem, _ = paths.filesystem_of(pieces[0][0])
    joined = _joined(pieces)
    keys = [filesystem._strip_protocol(path) for path, _, _ in joined]
    starts, stops = [start for _, start, _ in joined], [stop for _, _, stop in joined]
    blocks = filesystem.cat_ranges(keys, starts, stops, on_error="return")
    found: list[bytes | BaseException] = []
    for path, start, stop in pieces:
        at = bisect.bisect_right(joined, (path, start, math.inf)) - 1
        block, first = blocks[at], joined[at][1]
        found.append(block[start - first : stop - first] if isinstance(block, bytes) else block)
    return found


def _joined(pieces: Sequence[Range]) -> list[Range]:
    """Return sorted ranges that cover `pieces`, joined over gaps of `GAP_BYTES` up to `JOINED_BYTES`."""
    joined: list[Range] = []
    for path, start, stop in sorted(pieces):
        if joined and joined[-1][0] == path:
            _, first, last = joined[-1]
            if (start <= last + GAP_BYTES and max(stop, last) - first <= JOINED_BYTES) or stop <= last:
                joined[-1] = (path, first, max(stop, last))
                continue
        joined.append((path, start, stop))
    return joined


def _remote_size(path: str) -> int:
    filesystem, key = paths.filesystem_of(path)
    return int(filesystem.info(key)["size"])


def _read_local(path: str, start: int, stop: int) -> bytes | BaseException:
    try:
        with Path(path.removeprefix("file://")).open("rb") as file:
            return os.pread(file.fileno(), stop - start, start)
    except OSError as error:
        return error


def _whole(data: bytes, piece: Range) -> bytes:
    path, start, stop = piece
    if len(data) != stop - start:
        raise ConfigError(
            f"{path}; the file ends at byte {start + len(data):,} where {stop:,} bytes are expected; it was cut off or "
            "written anew: make it again."
        )
    return data


def _lasting_error(path: str, what: str, error: BaseException, *, num_tries: int) -> ConfigError:
    if isinstance(error, FileNotFoundError):
        return ConfigError(f"{path}; there is no such file; was it moved or removed? Make it again or mend the path.")
    tries = f" in {num_tries} tries" if is_transient(error) else ""
    return ConfigError(
        f"{path}; {what} cannot be read{tries}: {type(error).__name__}: {error}; check the network, and that this "
        "account may read the folder."
    )
