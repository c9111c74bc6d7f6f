"""Local paths and fsspec URLs (gs://, memory://) behind a few functions: find, read whole or in ranges, write, list.

A written file appears whole or not at all: locally through a temporary file and a rename; remotely through one upload
whose bytes are ready before it starts. (fsspec publishes the partial object when an exception leaves an open file's
`with` block, so no file is ever held open on a URL.) Listings are never cached: gcsfs would keep another writer's new
file invisible. An operation that fails for the moment is tried again (storage/retry.py). A relative local path is
tried from the working folder and then from the repository's root, since shipped samples are written
`tpu_experiments/samples/...`."""

import bisect
import difflib
import fcntl
import glob
import math
import os
import random
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.folders import REPOSITORY
from tpu_experiments.config.redaction import redacted_text
from tpu_experiments.config.regular_files import open_regular, read_regular, require_regular
from tpu_experiments.storage.retry import (
    SILENT_TRIES_AGAIN,
    WAITS_SECONDS,
    NoAnswer,
    can_observe_transfers,
    is_transient,
    session_settings,
    with_retries,
    with_timeout,
)

Result = TypeVar("Result")

PROTOCOLS = frozenset(
    ("file", "memory", "gs", "gcs", "s3", "s3a", "r2", "az", "abfs", "abfss", "adl", "oss", "hf", "http", "https")
)
"""Allowed protocols: storage and web servers. Others of fsspec render templates, unpack, run or mount their target."""
COPIED_BYTES = 64 * 2**20
"""Bytes of a remote file in memory while it is copied."""
GCSFS_CHUNK_BYTES = 64 * 2**20  # gcsfs uploads in 5 MiB pieces otherwise, one request each


def is_remote(path: str) -> bool:
    """Return whether `path` is a URL of another file system than the local one."""
    return "://" in path and not path.startswith("file://")


def join(base: str, *parts: str) -> str:
    """Join `base/part/part`, for local paths and URLs alike."""
    if not is_remote(base):
        return os.path.join(base, *parts)
    return "/".join([base.rstrip("/"), *(part.strip("/") for part in parts)])


def folder_of(path: str) -> str:
    """Return the parent folder of a path, `.` if it has none."""
    return path.rpartition("/")[0] or "."


def absolute(path: str) -> str:
    """Return a local path made absolute; a URL unchanged."""
    return path if is_remote(path) else str(_local(path).resolve())


def exists(path: str) -> bool:
    """Return whether there is a file or a folder at `path` (remotely: at least one object below it).

    Raises:
        Exception: the file system cannot be asked. (fsspec's own `exists` returns False for any error.)
    """
    if not is_remote(path):
        return _local(path).exists()
    try:
        _remotely(path, "look up", lambda filesystem, key: filesystem.info(key))
    except FileNotFoundError:
        return False
    return True


def make_dirs(path: str) -> None:
    """Create a local folder and its parents; does nothing on object stores, which have no folders."""
    if not is_remote(path):
        _local(path).mkdir(parents=True, exist_ok=True)


def list_names(folder: str) -> list[str]:
    """Return the sorted names in `folder`; empty if it does not exist.

    Object stores have no empty folders.

    Raises:
        NotADirectoryError: a local file has that name.
    """
    try:
        if not is_remote(folder):
            return sorted(os.listdir(_local(folder)))
        found = _remotely(folder, "list", lambda filesystem, key: filesystem.ls(key, detail=False))
    except FileNotFoundError:
        return []
    own = filesystem_of(folder)[1].strip("/")
    keys = {str(name).strip("/") for name in found} - {own}  # gcsfs lists a placeholder as itself
    return sorted(name.rpartition("/")[2] for name in keys)


def read_bytes(path: str, *, most: int | None = None) -> bytes:
    """Read a whole file.

    Args:
        most: largest size in bytes of a local one; by default that for its suffix (config/regular_files.py).

    Raises:
        FileNotFoundError: there is no such file.
        NotRegular: it is local, and a device, named pipe or socket, or too large.
    """
    if not is_remote(path):
        return read_regular(_local(path), most=most)
    return bytes(_remotely(path, "read", lambda filesystem, key: filesystem.cat_file(key)))


def read_text(path: str, *, most: int | None = None) -> str:
    """Read a whole file as UTF-8; arguments and errors as of `read_bytes`."""
    return read_bytes(path, most=most).decode()


def write_text_atomic(path: str, text: str) -> None:
    """Replace a file by `text` in UTF-8; readers see the old file or the new one, also after a crash."""
    write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: str, data: bytes) -> None:
    """Replace a file by `data`; readers see the old file or the new one, also after a crash."""
    if is_remote(path):
        _remotely(path, "write", lambda filesystem, key: filesystem.pipe_file(key, data))
    else:
        with_retries(
            lambda: _replace(_local(path), fill=lambda temporary: temporary.write_bytes(data)),
            place=path,
            operation="write",
        )


def modified_seconds(path: str) -> float | None:
    """Return the Unix seconds of the last write by the storage's clock; None if it records none.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not is_remote(path):
        return _local(path).stat().st_mtime
    try:
        return float(_remotely(path, "look up", lambda filesystem, key: filesystem.modified(key)).timestamp())
    except NotImplementedError:
        return None


def write_chunks_atomic(path: str, chunks: Iterable[memoryview]) -> None:
    """Replace a file by the chunks in order; memory holds one chunk of a local file, all of a remote one."""
    if is_remote(path):
        write_bytes_atomic(path, b"".join(chunks))
        return

    def fill(temporary: Path) -> None:
        with temporary.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)

    _replace(_local(path), fill=fill)


def forget_cached(path: str) -> None:
    """Drop a local file from the page cache, so that the next read comes from the disk."""
    if is_remote(path) or not hasattr(os, "posix_fadvise"):
        return
    with _local(path).open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy_file(local: str, destination: str) -> None:
    """Copy a local file to a path or URL, atomically.

    Raises:
        FileNotFoundError: `local` does not exist.
    """
    if is_remote(destination):
        options = {"chunksize": GCSFS_CHUNK_BYTES} if destination.startswith(("gs://", "gcs://")) else {}
        _remotely(destination, "upload", lambda filesystem, key: filesystem.put_file(local, key, **options))
    else:
        _replace(_local(destination), fill=lambda temporary: shutil.copyfile(local, temporary))


def remove_tree(path: str) -> None:
    """Remove a folder with everything below it, or one file; does nothing if there is neither.

    Of symbolic links, here and below, the link is removed and never its target.
    """
    if is_remote(path):
        _remotely(path, "remove", _remove_remote)
    elif _local(path).is_dir() and not is_link(path):
        shutil.rmtree(_local(path))
    else:
        _link_of(path).unlink(missing_ok=True)


def remove_marked(folder: str, marker: str) -> None:
    """Remove a folder, its completion marker first; of a symbolic link, the link alone."""
    if not is_link(folder):
        remove_tree(join(folder, marker))
    remove_tree(folder)


def require_own(folder: str, *, marker: str, begun: str, advice: str) -> None:
    """Require a folder to be empty, or a command's own: with its marker, or with the file that it writes first.

    Raises:
        ConfigError: it holds other files.
    """
    names = list_names(folder)
    if names and marker not in names and begun not in names:
        raise ConfigError(
            f"{folder}; it holds {names[0]} and no {marker}, so it is not this command's, and nothing is written over; "
            f"{advice}."
        )


@contextmanager
def local_copy(folder: str) -> Iterator[str]:
    """Yield a local folder with a folder's files; those of a remote one are copied for as long as it is used."""
    if not is_remote(folder):
        yield absolute(folder)
        return
    with tempfile.TemporaryDirectory(prefix="tpu_experiments_") as local:
        for name in list_names(folder):
            source = join(folder, name)
            num_bytes = size_of(source) or 0
            starts = range(0, num_bytes, COPIED_BYTES)
            pieces = (memoryview(read_range(source, at, min(at + COPIED_BYTES, num_bytes))) for at in starts)
            write_chunks_atomic(join(local, name), pieces)
        yield local


def is_link(path: str) -> bool:
    """Return whether a local path is itself a symbolic link; False for URLs."""
    return not is_remote(path) and _link_of(path).is_symlink()


def require_no_links(folder: str, *, key: str) -> None:
    """Check that a folder that is to be written and cleared directly contains files and folders only, no links.

    The target of a link may belong to others, and opening a named pipe would wait for ever.

    Args:
        key: key=value of the config that the folder comes from, for the message.

    Raises:
        ConfigError: it contains a symbolic link, a device, a named pipe or a socket.
    """
    if is_remote(folder) or not _local(folder).is_dir():
        return
    links = [name for name in list_names(folder) if is_link(join(folder, name))]
    if links:
        raise ConfigError(
            f"{key}; {join(folder, links[0])} is a symbolic link, and files are written and removed there; move what "
            "it leads to in its place, or link the whole output_dir."
        )
    for name in list_names(folder):
        if not _local(join(folder, name)).is_dir():
            require_regular(join(folder, name), key=key)


def _link_of(path: str) -> Path:
    """Return the path without a trailing slash, with which a link would be followed."""
    return _local(path.rstrip("/") or path)


def _local(path: str) -> Path:
    return Path(path.removeprefix("file://"))


def filesystem_of(url: str) -> tuple[Any, str]:
    """Return the file system of a URL (fsspec caches one per process) and the key in it.

    Raises:
        ConfigError: the protocol is neither in `PROTOCOLS` nor registered by a user, or the URL chains several.
    """
    from fsspec.core import url_to_fs  # imports gcsfs only for a gs:// URL
    from fsspec.registry import known_implementations, registry

    protocol = url.partition("://")[0] if "://" in url else "file"
    if "::" in url or protocol not in PROTOCOLS | (registry.keys() - known_implementations.keys()):
        raise ConfigError(
            f"{redacted_text(url)}; {'a chain of addresses' if '::' in url else protocol + '://'} is not opened; give "
            f"a local path, or a URL of {', '.join(sorted(PROTOCOLS))}."
        )
    # gcsfs 2026 asks for each bucket's type first and logs an error if it has no permission.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    options = {"session_kwargs": session_settings()} if can_observe_transfers(url) else {}
    filesystem, key = url_to_fs(url, use_listings_cache=False, **options)
    filesystem.invalidate_cache()
    return filesystem, key


def _remotely(url: str, operation: str, call: Callable[[Any, str], Result]) -> Result:
    """Return `call(file system, key)`, with retries and timeouts."""
    return with_retries(lambda: call(*filesystem_of(url)), place=url, operation=operation)


def _remove_remote(filesystem: Any, key: str) -> None:
    try:
        filesystem.rm(key, recursive=True)
    except FileNotFoundError:  # never there, or an earlier try removed it and its answer was lost
        return


def _replace(path: Path, *, fill: Callable[[Path], object]) -> None:
    """Fill a temporary file next to `path`, sync it to disk, then rename it."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("xb") as held:
            with suppress(OSError):  # not every mount has locks
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its writer lives (remove_leftovers)
            fill(temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself survives a power cut only after this
    finally:
        os.close(folder)


_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp", re.DOTALL)


def remove_leftovers(folder: str) -> None:
    """Remove the temporary files that killed processes left in a local folder and below; does nothing for a URL.

    A file whose writer lives is locked and stays, as do all where the mount has no locks. Remote writes have none.
    """
    if is_remote(folder):
        return
    for place, _, names in os.walk(_local(folder)):
        for name in filter(_TEMPORARY.fullmatch, names):
            with suppress(OSError), Path(place, name).open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                Path(place, name).unlink()


def find_local(path: str) -> Path | None:
    """Return the existing local file or folder of a configured path; None if there is none, and for a URL.

    The path is returned as it was given where it exists from the working folder.
    """
    if is_remote(path):
        return None
    return next((place for place in _candidates(path) if place.exists()), None)


def shown_path(path: str) -> str:
    """Return a path in the repository relative to its root, the same on all machines; others unchanged."""
    return path.removeprefix(f"{REPOSITORY}/")


def near_misses(path: str) -> str:
    """Return `Did you mean ...? ` if the parent folder has a similar name, else empty.

    If the parent folder is missing too, return a sentence that says so.
    """
    given = Path(path.removeprefix("file://")).expanduser()
    folder = next((place.parent for place in _candidates(path) if place.parent.is_dir()), None)
    if folder is None:
        return f"The folder {given.parent} does not exist either. "
    return _did_you_mean(given.name, sorted(entry.name for entry in folder.iterdir()), folder=str(folder))


def is_glob(path: str) -> bool:
    """Return whether `path` contains `*`, `?` or `[`."""
    return glob.has_magic(path)


def local_files(path: Path) -> dict[str, str]:
    """Return the path of every file below a folder, by its relative name; hidden ones are left out."""
    inside = {file.relative_to(path).as_posix(): str(file) for file in path.rglob("*") if file.is_file()}
    return _sorted_visible(inside)


def local_matches(pattern: str) -> dict[str, str]:
    """Return the path of every file that a local pattern matches, by its name relative to the fixed part."""
    for place in _candidates(pattern):
        found = [name for name in glob.glob(str(place), recursive=True) if Path(name).is_file()]
        if found:
            fixed = _fixed_part(str(place))
            return _sorted_visible({name.removeprefix(fixed): name for name in found})
    return {}


def remote_files(url: str) -> dict[str, str]:
    """Return the URL of every file of a URL (a file, a folder or a pattern), by its relative name.

    Empty if there is none.

    Raises:
        Exception: the file system is out of reach; the type is that of the file system's client.
    """
    filesystem, key = with_timeout(lambda: filesystem_of(url), place=url, operation="list")
    if is_glob(key):
        found = with_timeout(lambda: filesystem.glob(key, detail=True), place=url, operation="list")
        fixed = _fixed_part(key)
    else:
        found = with_timeout(lambda: filesystem.find(key, detail=True), place=url, operation="list")
        fixed = key.rstrip("/") + "/"
    names = [name for name, about in found.items() if about.get("type") == "file" and not name.endswith("/")]
    if names == [key]:
        return {key.rpartition("/")[2]: url}
    return _sorted_visible({name.removeprefix(fixed): filesystem.unstrip_protocol(name) for name in names})


def remote_near_misses(url: str) -> str:
    """Return `Did you mean ...? ` if the remote folder has a similar name; empty if it cannot be listed."""
    base, _, name = url.rstrip("/").rpartition("/")
    try:
        filesystem, key = with_timeout(lambda: filesystem_of(base), place=base, operation="list")
        listed = with_timeout(lambda: filesystem.ls(key, detail=False), place=base, operation="list")
        entries = [str(entry).rstrip("/").rpartition("/")[2] for entry in listed]
    except Exception:  # only a hint is lost
        return ""
    return _did_you_mean(name, sorted(entries), folder=base)


def remote_info(url: str) -> dict[str, Any]:
    """Return the file system's metadata of one remote file: size, and any of etag, checksums and times.

    Raises:
        Exception: there is no such file, or the file system is out of reach; the type is that of its client.
    """

    def info() -> dict[str, Any]:
        filesystem, key = filesystem_of(url)
        return dict(filesystem.info(key))

    return with_timeout(info, place=url, operation="look up")


def _candidates(path: str) -> tuple[Path, Path]:
    given = Path(path.removeprefix("file://")).expanduser()
    return given, REPOSITORY / given


def _fixed_part(pattern: str) -> str:
    """Return the folders before the first component with a wildcard, with a trailing slash."""
    parts = pattern.split("/")
    first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    return "".join(part + "/" for part in parts[:first])


def _sorted_visible(url_of_name: dict[str, str]) -> dict[str, str]:
    """Sort by folders, then names, without names with a leading dot (of the Hub's client and editors)."""
    visible = [name for name in url_of_name if not any(part.startswith(".") for part in name.split("/"))]
    return {name: url_of_name[name] for name in sorted(visible, key=lambda name: name.split("/"))}


def _did_you_mean(name: str, names: list[str], *, folder: str) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(near)} in {folder}? " if near else ""


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
            if not is_remote(path):
                return Path(path.removeprefix("file://")).stat().st_size
            return with_timeout(lambda: _remote_size(path), place=path, operation="look up")
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
    if not is_remote(pieces[0][0]):
        return [_read_local(*piece) for piece in pieces]
    try:
        return with_timeout(lambda: _remote_ranges(pieces), place=pieces[0][0], operation=f"read {len(pieces)} parts")
    except Exception as error:
        return [error] * len(pieces)


def _remote_ranges(pieces: Sequence[Range]) -> list[bytes | BaseException]:
    """Read ranges with nearby ones joined: 256 rows of a small shard are one request, not 256."""
    filesystem, _ = filesystem_of(pieces[0][0])
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
    filesystem, key = filesystem_of(path)
    return int(filesystem.info(key)["size"])


def _read_local(path: str, start: int, stop: int) -> bytes | BaseException:
    try:
        with open_regular(_local(path)) as file:
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
