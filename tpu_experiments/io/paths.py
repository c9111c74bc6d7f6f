"""Local paths and fsspec URLs (gs://, memory://) behind a few functions.

A written file appears whole or not at all: locally through a temporary file and a rename; remotely
through one upload whose bytes are ready before it starts. (fsspec publishes the partial object when
an exception leaves an open file's `with` block, so no file is ever held open on a URL.)
Listings are never cached: gcsfs would keep another writer's new file invisible.
An operation that fails for the moment is tried again (io/retry.py).
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
"""Storage and web servers. Of fsspec's others some render templates, unpack, run or mount what an address names."""
GCSFS_CHUNK_BYTES = 64 * 2**20  # gcsfs uploads in 5 MiB pieces otherwise, one request each


def is_remote(path: str) -> bool:
    """Whether `path` is a URL of another file system than the local one."""
    return "://" in path and not path.startswith("file://")


def join(base: str, *parts: str) -> str:
    """`base/part/part`, for local paths and URLs alike."""
    if not is_remote(base):
        return os.path.join(base, *parts)
    return "/".join([base.rstrip("/"), *(part.strip("/") for part in parts)])


def folder_of(path: str) -> str:
    """The folder that a file lies in, `.` where its path names none."""
    return path.rpartition("/")[0] or "."


def absolute(path: str) -> str:
    """A local path from the root; a remote one as it is."""
    return path if is_remote(path) else str(_local(path).resolve())


def exists(path: str) -> bool:
    """Whether there is a file at `path`, or a folder (remotely: at least one object below it).

    Raises:
        Exception: the file system does not say. (fsspec's own `exists` takes any error for a no.)
    """
    if not is_remote(path):
        return _local(path).exists()
    try:
        _remotely(path, "look up", lambda filesystem, key: filesystem.info(key))
    except FileNotFoundError:
        return False
    return True


def make_dirs(path: str) -> None:
    """Make a local folder and its parents; object stores have no folders, so nothing there."""
    if not is_remote(path):
        _local(path).mkdir(parents=True, exist_ok=True)


def list_names(folder: str) -> list[str]:
    """Sorted names in `folder`; empty when it does not exist (an object store knows no empty one).

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
    """The whole file.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not is_remote(path):
        return _local(path).read_bytes()
    return bytes(_remotely(path, "read", lambda filesystem, key: filesystem.cat_file(key)))


def read_text(path: str) -> str:
    """The whole file as UTF-8.

    Raises:
        FileNotFoundError: there is no such file.
    """
    return read_bytes(path).decode()


def write_text_atomic(path: str, text: str) -> None:
    """Replace the file by `text` in UTF-8; readers see the old file or the new one."""
    write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: str, data: bytes) -> None:
    """Replace the file by `data`; readers see the old file or the new one, also after a crash."""
    if is_remote(path):
        _remotely(path, "write", lambda filesystem, key: filesystem.pipe_file(key, data))
    else:
        retried(
            lambda: _replace(_local(path), fill=lambda temporary: temporary.write_bytes(data)),
            place=path,
            operation="write",
        )


def modified_seconds(path: str) -> float | None:
    """Unix seconds of the last write by the storage's own clock; None where it keeps no such time.

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
    """Replace the file by the chunks in order; a local one is written without holding more than a chunk."""
    if is_remote(path):
        write_bytes_atomic(path, b"".join(chunks))
        return

    def fill(temporary: Path) -> None:
        with temporary.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)

    _replace(_local(path), fill=fill)


def forget_cached(path: str) -> None:
    """Have the next read of a written file come from the disk, not from the pages that the system keeps of it."""
    if is_remote(path) or not hasattr(os, "posix_fadvise"):
        return
    with _local(path).open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy_file(local: str, destination: str) -> None:
    """Copy a local file to a path or URL; the destination appears whole or not at all.

    Raises:
        FileNotFoundError: `local` does not exist.
    """
    if is_remote(destination):
        options = {"chunksize": GCSFS_CHUNK_BYTES} if destination.startswith(("gs://", "gcs://")) else {}
        _remotely(destination, "upload", lambda filesystem, key: filesystem.put_file(local, key, **options))
    else:
        _replace(_local(destination), fill=lambda temporary: shutil.copyfile(local, temporary))


def remove_tree(path: str) -> None:
    """Remove a folder with everything below it, or one file; nothing there is fine.

    Of a symbolic link the link is removed, never what it leads to; the same holds for links below.
    """
    if is_remote(path):
        _remotely(path, "remove", _remove_remote)
    elif _local(path).is_dir() and not is_link(path):
        shutil.rmtree(_local(path))
    else:
        _link_of(path).unlink(missing_ok=True)


def remove_marked(folder: str, marker: str) -> None:
    """Remove a folder, first the file in it that says that it is complete; of a symbolic link the link alone."""
    if not is_link(folder):
        remove_tree(join(folder, marker))
    remove_tree(folder)


def is_link(path: str) -> bool:
    """Whether a local path is a symbolic link itself; nothing remote is."""
    return not is_remote(path) and _link_of(path).is_symlink()


def require_no_links(folder: str, *, key: str) -> None:
    """Check what lies directly in a folder that is written to and cleared; what a link leads to belongs to others.

    Args:
        key: key=value that the folder comes from.

    Raises:
        ConfigError: a symbolic link is among it.
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
    """Without a slash at the end, which would be followed."""
    return _local(path.rstrip("/") or path)


def _local(path: str) -> Path:
    return Path(path.removeprefix("file://"))


def filesystem_of(url: str) -> tuple[Any, str]:
    """The file system (fsspec caches one per process) and the key in it.

    Raises:
        ConfigError: it is not of `PROTOCOLS` and nobody has registered it since, or it is a chain of several.
    """
    from fsspec.core import url_to_fs  # imports gcsfs only for a gs:// URL
    from fsspec.registry import known_implementations, registry

    protocol = url.partition("://")[0] if "://" in url else "file"
    if "::" in url or protocol not in PROTOCOLS | (registry.keys() - known_implementations.keys()):
        raise ConfigError(
            f"{redacted_text(url)}; {'a chain of addresses' if '::' in url else protocol + '://'} is not opened; give "
            f"a local path, or a URL of {', '.join(sorted(PROTOCOLS))}."
        )
    # gcsfs 2026 asks for each bucket's type first and logs a failure when it may not.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    options = {"session_kwargs": session_settings()} if is_seen(url) else {}
    filesystem, key = url_to_fs(url, use_listings_cache=False, **options)
    filesystem.invalidate_cache()
    return filesystem, key


def _remotely(url: str, operation: str, call: Callable[[Any, str], Result]) -> Result:
    """What `call(file system, key)` returns."""
    return retried(lambda: call(*filesystem_of(url)), place=url, operation=operation)


def _remove_remote(filesystem: Any, key: str) -> None:
    try:
        filesystem.rm(key, recursive=True)
    except FileNotFoundError:  # never there, or an earlier try removed it and its answer was lost
        return


def _replace(path: Path, *, fill: Callable[[Path], object]) -> None:
    """Fill a temporary file next to `path`, bring it to disk, then rename it."""
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
