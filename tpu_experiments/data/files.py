"""Rows of local files: .jsonl, .json (an array, or one object a line), .parquet.

Every reader streams; the largest piece held is one line, one array element or one parquet batch.
"""

import codecs
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pyarrow
import pyarrow.parquet

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.formats import Row

CHUNK_BYTES = 1 << 20
ROWS_PER_PARQUET_BATCH = 1000


def read_file(path: Path, *, name: str, key: str) -> Iterator[Row]:
    """Rows of one file; `name` stands for it in ids and errors, `key` begins an error.

    Raises:
        ConfigError: the file is not what its suffix says; with the line or row.
    """
    return READER_OF_SUFFIX[path.suffix.lower()](path, name, key)


def _read_lines(path: Path, name: str, key: str) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"line {number} of {name}"
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            text = _decoded(line, place=place, key=key)
            if text.strip():
                yield Row(_parsed(text, place=place, key=key), name, "line", number)


def _decoded(line: bytes, *, place: str, key: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{key}; {place} is not UTF-8: byte 0x{line[error.start]:02x} at byte "
            f"{error.start + 1} of the line ({error.reason}); convert the file to UTF-8."
        ) from error


def _parsed(text: str, *, place: str, key: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{key}; {place} is not JSON: {error}; mend or remove the line.") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{key}; {place} is a JSON {type(fields).__name__}, not an object; write one object a line.")
    return fields


def _read_json(path: Path, name: str, key: str) -> Iterator[Row]:
    """An array of objects, or one object a line: told apart by the first character."""
    with path.open("rb") as file:
        start = file.read(CHUNK_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
        if start == b"[":
            file.seek(0)
            yield from _read_array(file, name, key)
            return
    if start and (start != b"{" or not _first_line_is_object(path)):
        raise ConfigError(
            f"{key}; {name} is neither a JSON array of objects nor one object a line; wrap its "
            "rows in [ ] or write each on a line of its own."
        )
    yield from _read_lines(path, name, key)


def _first_line_is_object(path: Path) -> bool:
    with path.open("rb") as file:
        line = next(line for line in file if line.removeprefix(codecs.BOM_UTF8).strip())
    return line.strip().endswith(b"}")


def _read_array(file: BinaryIO, name: str, key: str) -> Iterator[Row]:
    """Elements of a JSON array one by one; the Hub's files of 1 GB are a single array."""
    buffer = _ArrayBuffer(file, name=name, key=key)
    buffer.skip("[")
    number = 0
    while buffer.peek() != "]":
        number += 1
        fields = buffer.element(number)
        if not isinstance(fields, dict):
            raise ConfigError(
                f"{key}; row {number} of {name} is a JSON {type(fields).__name__}, not an object; "
                "write an array of objects."
            )
        yield Row(fields, name, "row", number)
        if buffer.peek() == ",":
            buffer.skip(",")
        elif buffer.peek() != "]":
            raise buffer.broken(number, f"expected , or ] after it but found {buffer.peek()!r}")
    buffer.skip("]")
    if buffer.peek():
        raise buffer.broken(number, f"more follows the array: {buffer.peek()!r}")


class _ArrayBuffer:
    """The undecoded rest of a JSON text, read from the file as it is needed."""

    def __init__(self, file: BinaryIO, *, name: str, key: str) -> None:
        self.file = file
        self.name = name
        self.key = key
        self.text = ""
        self.position = 0
        self.chunk_bytes = CHUNK_BYTES
        self.num_newlines = 0
        self.decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self.parse = json.JSONDecoder().raw_decode

    def peek(self) -> str:
        """The next character that is not white space; empty at the end of the file."""
        while True:
            rest = self.text[self.position : self.position + 1]
            if rest and not rest.isspace():
                return rest
            if rest:
                self.position += 1
            elif self._more() == "end":
                return ""

    def skip(self, character: str) -> None:
        assert self.peek() == character
        self.position += 1

    def element(self, number: int) -> Any:
        """The next value; reads on while it is incomplete."""
        self.peek()
        self.chunk_bytes = CHUNK_BYTES
        while True:
            try:
                value, self.position = self.parse(self.text, self.position)
                return value
            except json.JSONDecodeError as error:
                complaint = f"{error.msg} at {self.text[error.pos : error.pos + 20]!r}"
                self.chunk_bytes *= 2  # so that a value of n bytes is parsed O(log n) times
                if self._more() == "end":
                    raise self.broken(number, complaint) from error

    def broken(self, number: int, complaint: str) -> ConfigError:
        return ConfigError(f"{self.key}; row {number} of {self.name} is not JSON: {complaint}; mend the file.")

    def _more(self) -> Literal["read", "end"]:
        data = self.file.read(self.chunk_bytes)
        try:
            fresh = self.decode(data, not data)
        except UnicodeDecodeError as error:
            line = self.num_newlines + error.object[: error.start].count(b"\n") + 1
            raise ConfigError(
                f"{self.key}; line {line} of {self.name} is not UTF-8: byte "
                f"0x{error.object[error.start]:02x} ({error.reason}); convert the file to UTF-8."
            ) from error
        self.num_newlines += fresh.count("\n")
        self.text = self.text[self.position :] + fresh
        self.position = 0
        return "read" if data else "end"


def _read_parquet(path: Path, name: str, key: str) -> Iterator[Row]:
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_PER_PARQUET_BATCH):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(fields, name, "row", number)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"{key}; {name} is not a readable parquet file after {number} rows: {error}; download it again."
        ) from error


READER_OF_SUFFIX: dict[str, Callable[[Path, str, str], Iterator[Row]]] = {
    ".jsonl": _read_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
