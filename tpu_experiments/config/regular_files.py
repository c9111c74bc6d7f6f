"""Opening of files that a user or a file of theirs names: regular ones of bounded size, and nothing else.

A folder that somebody sent may hold a link to a device, a named pipe, a socket or a sparse file in the place of any
file: reading would fill the memory or wait for ever. The file is opened without waiting (O_NONBLOCK has no effect on
regular files), and what was opened is looked at, so that it cannot be exchanged in between.
"""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

from tpu_experiments.config.errors import ConfigError

MIB = 2**20
MOST_BYTES = {".yaml": MIB, ".yml": MIB, ".jinja": MIB, ".jinja2": MIB, ".j2": MIB, ".json": 64 * MIB}
"""Largest file of settings; a tokenizer.json has up to 35 MiB (Gemma 3)."""
MOST_RECORD_BYTES = 512 * MIB
"""Largest .jsonl that is read as a whole, such as the metrics of a million steps."""
MOST_WHOLE_BYTES = 8 * 2**30
"""Largest file of any other kind that is read as a whole, such as the weights of an adapter."""
KINDS = {
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


class NotRegular(ConfigError):
    """What has the name of a file is none, or is larger than such a file can be."""


def open_regular(path: str | Path, *, most: int | None = None, key: str | None = None) -> BufferedReader:
    """Open a regular file for reading from its start.

    Args:
        most: largest size in bytes; None sets no limit, for files that are read in pieces.
        key: key=value of the config that named the file, for the message.

    Raises:
        NotRegular: it is a device, named pipe or socket, or larger than `most`.
        OSError: it cannot be opened: FileNotFoundError, IsADirectoryError, PermissionError.
    """
    require_regular(path, most=most, key=key)  # opening a device may have an effect by itself
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require(os.fstat(descriptor), path, most=most, key=key)
    except BaseException:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")


def require_regular(path: str | Path, *, most: int | None = None, key: str | None = None) -> None:
    """Check that a file is regular and no larger than `most` bytes; arguments and errors as of `open_regular`."""
    _require(os.stat(path), path, most=most, key=key)


def read_regular(path: str | Path, *, most: int | None = None, key: str | None = None) -> bytes:
    """Read a regular file as a whole, by default of at most the size for its suffix; errors as `open_regular`."""
    with open_regular(path, most=most or most_bytes(path), key=key) as file:
        return file.read()


def most_bytes(path: str | Path) -> int:
    """Return the largest size of a file that is read as a whole, by its suffix."""
    suffix = os.path.splitext(path)[1].lower()
    return MOST_RECORD_BYTES if suffix == ".jsonl" else MOST_BYTES.get(suffix, MOST_WHOLE_BYTES)


def require_regular_folder(folder: str | Path, *, key: str) -> None:
    """Check the files of a folder that a library is to open by itself, those in its folders too.

    Files of settings have at most the size that they may have here; a link that leads nowhere is left to the library.

    Raises:
        NotRegular: one is a device, named pipe or socket, or too large.
    """
    for name in sorted(os.listdir(folder)):
        path = Path(folder) / name
        try:
            if path.is_dir():
                for inner in sorted(path.glob("*.jinja")):
                    require_regular(inner, most=most_bytes(inner), key=key)
            else:
                require_regular(path, most=MOST_BYTES.get(path.suffix.lower()), key=key)
        except FileNotFoundError:
            continue


def _require(about: os.stat_result, path: str | Path, *, most: int | None, key: str | None) -> None:
    place = f"{key}; {path}" if key is not None and not key.endswith(f"={path}") else key or str(path)
    kind = stat.S_IFMT(about.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        raise NotRegular(
            f"{place}; it is {KINDS.get(kind, 'no file')}, which could wait or go on for ever, and only regular files "
            "are read; find out who made it, or write its content to a file."
        )
    if most is not None and about.st_size > most:
        raise NotRegular(
            f"{place}; it has {about.st_size:,} bytes ({about.st_blocks * 512:,} on the disk), and such a file is "
            f"read up to {most:,}; find out who made it."
        )
