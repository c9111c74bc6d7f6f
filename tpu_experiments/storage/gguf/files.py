"""The header of a GGUF file, its SHA-256, and where its checkpoint is kept; no framework is loaded.

Layout (github.com/ggml-org/ggml, docs/gguf.md): magic, version, numbers of tensors and of values; the values, each with
its name and type; names, sizes, types and places of the tensors; behind a boundary, their data.
"""

import hashlib
import math
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.folders import cache_folder
from tpu_experiments.config.schema import Config
from tpu_experiments.storage.paths import find_local

SUFFIX = ".gguf"
PINNED = "sha256:"
"""Beginning of `model.revision` where `model.path` is a GGUF file; its SHA-256 follows."""
LAYOUT = 1
"""Number of the way in which checkpoints are made; another one makes them anew."""
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""struct's letters by GGUF's numbers of types."""
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file."""

    shape: tuple[int, ...]
    """In torch's order."""
    kind: int
    """ggml's number of its data type."""
    start: int
    """First byte in the file."""


@dataclass(frozen=True)
class Header:
    """What a file says of itself."""

    path: Path
    values: dict[str, Any]
    tensors: dict[str, StoredTensor]
    nbytes: int


def is_gguf(path: Path | None) -> bool:
    """Return whether a local path is a GGUF file by its name."""
    return path is not None and path.suffix.lower() == SUFFIX and path.is_file()


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file in hex digits; it is computed once for each state of the file."""
    status = file.stat()
    return _digest(file.resolve(), status.st_size, status.st_mtime_ns)


@cache
def _digest(file: Path, _size: int, _changed: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def folder_of(file: Path, *, revision: str | None = None) -> Path:
    """Return the folder of a GGUF file's checkpoint in the cache, which may not have been made.

    It has the file's name, as adapters name their base by the last part of its path.

    Args:
        revision: `model.revision`.

    Raises:
        ConfigError: the file is another one than `revision` says.
    """
    digest = sha256_of(file)
    if revision is not None and revision != PINNED + digest:
        raise ConfigError(
            f"model.path={file} with model.revision={revision}; the file's SHA-256 is {digest}: it is another file "
            "than the one that was trained on, or is damaged; restore it, or leave model.revision out for a new run."
        )
    return Path(cache_folder("gguf"), f"{digest[:32]}-{LAYOUT}", file.name)


def pinned(config: Config) -> Config:
    """Return the config with the SHA-256 of a GGUF file in `model.path` as `model.revision`.

    So a run keeps it, and another file of the same name is refused.
    """
    model = config.model
    local = find_local(model.path)
    if local is None or not is_gguf(local) or model.revision is not None:
        return config
    if model.size != "full" or model.init == "random":
        return config
    return replace(config, model=replace(model, revision=PINNED + sha256_of(local)))


def read_header(file: Path) -> Header:
    """Read the values and the list of tensors of a GGUF file.

    Raises:
        ConfigError: it is no GGUF file of version 2 or 3, is one part of several, or is damaged.
    """
    with _mapped(file) as data:
        try:
            header = _header(file, data)
        except (struct.error, UnicodeDecodeError, KeyError, TypeError, MemoryError) as error:
            raise _damaged(file, f"its header cannot be read ({type(error).__name__})") from error
    parts = header.values.get("split.count", 1)
    if parts != 1:
        raise ConfigError(
            f"model.path={file}; it is one of {parts} parts of a model; join them by "
            "`llama-gguf-split --merge FIRST_PART JOINED.gguf`, and name that."
        )
    return header


def _damaged(file: Path, why: str) -> ConfigError:
    return ConfigError(f"model.path={file}; it is no whole GGUF file: {why}; download it again.")


@contextmanager
def _mapped(file: Path) -> Iterator[mmap.mmap]:
    with file.open("rb") as stream:
        if file.stat().st_size < 24:
            raise _damaged(file, f"it has {file.stat().st_size} bytes")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


class _Reader:
    """Values of a file one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def numbers(self, letters: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{letters}", self.data, self.at)
        self.at += struct.calcsize(f"<{letters}")
        return found

    def text(self) -> str:
        (length,) = self.numbers("Q")
        if length > len(self.data) - self.at:
            raise struct.error
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.numbers(NUMBERS[kind])[0]
        inner, count = self.numbers("IQ")
        if count > len(self.data) - self.at:
            raise struct.error
        return (
            [self.text() for _ in range(count)] if inner == STRING else list(self.numbers(f"{count}{NUMBERS[inner]}"))
        )


def _header(file: Path, data: mmap.mmap) -> Header:
    reader = _Reader(data)
    magic, version, num_tensors, num_values = reader.numbers("4sIQQ")
    if magic != b"GGUF" or version not in (2, 3):
        raise _damaged(file, f"it begins with {magic!r} and version {version}, and 2 and 3 are read")
    values = {}
    for _ in range(num_values):
        name = reader.text()
        (kind,) = reader.numbers("I")
        values[name] = reader.value(kind)
    found = {}
    for _ in range(num_tensors):
        name = reader.text()
        (dims,) = reader.numbers("I")
        shape = reader.numbers(f"{dims}Q")
        kind, offset = reader.numbers("IQ")
        found[name] = StoredTensor(tuple(reversed(shape)), kind, offset)
    step = values.get("general.alignment", 32)
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        raise _damaged(file, f"its general.alignment is {step!r:.40}")
    begin = math.ceil(reader.at / step) * step
    tensors = {name: replace(tensor, start=begin + tensor.start) for name, tensor in found.items()}
    return Header(file, values, tensors, len(data))
