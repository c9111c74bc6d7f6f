"""Local paths and fsspec URLs (gs://, memory://) behind a few functions.

Writes are atomic: local files by a temporary file and a rename, remote files by one upload whose bytes are complete
before it starts. (fsspec publishes the partial object when an exception leaves an open file's `with` block, so no file
is ever kept open on a URL.) Listings are never cached: gcsfs would not show a new file of another writer. Transient
failures are retried (io/retry.py).
"""

import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.redaction import redacted_text
from tpu_experiments.io.answers import is_seen, session_settings
from tpu_experiments.io.retry import retried

Result = TypeVar("Result")

PROTOCOLS = frozenset(
    ("file", "memory", "gs", "gcs", "s3", "s3a", "r2", "az", "abfs", "abfss", "adl", "oss", "hf", "http", "https")
)
"""Allowed protocols: storage and web servers. Others of fsspec render templates, unpack, run or mount their target."""
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


def read_bytes(path: str) -> bytes:
    """Read a whole file.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not is_remote(path):
        return _local(path).read_bytes()
    return bytes(_remotely(path, "read", lambda filesystem, key: filesystem.cat_file(key)))


def read_text(path: str) -> str:
    """Read a whole file as UTF-8.

    Raises:
        FileNotFoundError: there is no such file.
    """
    return read_bytes(path).decode()


def write_text_atomic(path: str, text: str) -> None:
    """Replace a file by `text` in UTF-8; readers see the old file or the new one, also after a crash."""
    write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: str, data: bytes) -> None:
    """Replace a file by `data`; readers see the old file or the new one, also after a crash."""
    if is_remote(path):
        _remotely(path, "write", lambda filesystem, key: filesystem.pipe_file(key, data))
    else:
        retried(
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


def is_link(path: str) -> bool:
    """Return whether a local path is itself a symbolic link; False for URLs."""
    return not is_remote(path) and _link_of(path).is_symlink()


def require_no_links(folder: str, *, key: str) -> None:
    """Check that a folder that is to be written and cleared directly contains no symbolic links.

    The target of a link may belong to others.

    Args:
        key: key=value of the config that the folder comes from, for the message.

    Raises:
        ConfigError: it contains a symbolic link.
    """
    if is_remote(folder) or not _local(folder).is_dir():
        return
    links = [name for name in list_names(folder) if is_link(join(folder, name))]
    if links:
        raise ConfigError(
            f"{key}; {join(folder, links[0])} is a symbolic link, and files are written and removed there; move what "
            "it leads to in its place, or link the whole output_dir."
        )


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
    options = {"session_kwargs": session_settings()} if is_seen(url) else {}
    filesystem, key = url_to_fs(url, use_listings_cache=False, **options)
    filesystem.invalidate_cache()
    return filesystem, key


def _remotely(url: str, operation: str, call: Callable[[Any, str], Result]) -> Result:
    """Return `call(file system, key)`, with retries and timeouts."""
    return retried(lambda: call(*filesystem_of(url)), place=url, operation=operation)


def _remove_remote(filesystem: Any, key: str) -> None:
    try:
        filesystem.rm(key, recursive=True)
    except FileNotFoundError:  # never there, or an earlier try removed it and its answer was lost
        return


def _replace(path: Path, *, fill: Callable[[Path], object]) -> None:
    """Fill a temporary file next to `path`, sync it to disk, then rename it."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
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
