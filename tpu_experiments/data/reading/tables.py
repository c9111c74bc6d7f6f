"""Rows of tables: .csv, .tsv and .parquet."""

import csv
import io
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pyarrow
import pyarrow.parquet

from tpu_experiments.data.documents import Refused
from tpu_experiments.data.reading.raw_rows import RawRow, cut_off, place_of
from tpu_experiments.io.streams import ByteStream, ReadableStream, WatchedFile, open_binary

PARQUET_BATCH_BYTES = 8 << 20
PARQUET_BATCH_ROWS = 1000


def read_table(stream: ByteStream, *, name: str, delimiter: str) -> Iterator[RawRow | Refused]:
    """Records of a .csv or .tsv with a line of column names, in Python's default dialect (Excel's).

    A .csv whose names are separated by semicolons, as Excel writes it in most of Europe, is read as such. A record
    is numbered by its first line.
    """
    csv.field_size_limit(sys.maxsize)  # 128 KiB otherwise
    lines = _Lines(stream)
    first_line = next((line for line in lines if line.strip("\r\n")), "")
    if delimiter == "," and ";" in first_line and "," not in first_line:
        delimiter = ";"
    reader = csv.reader(chain([first_line], lines), delimiter=delimiter)
    place = place_of(lines.number, unit="line", file=name)
    try:
        columns = next(reader)
    except csv.Error as error:
        yield Refused("not_csv", place, f"has no readable column names ({error}); the file is not read.")
        return
    trouble = "opens a quotation that is not closed" if lines.is_over and not stream.damage else _trouble_with(columns)
    if trouble and first_line:
        yield Refused("not_csv", place, f"{trouble}; the file is not read; mend its line of column names.")
        return
    yield from _records(reader, lines=lines, columns=columns, name=name)
    if stream.damage:
        yield cut_off(place_of(lines.number + lines.last_is_whole, unit="line", file=name), damage=stream.damage)


def _trouble_with(columns: list[str]) -> str:
    twice = _repeated(columns)
    if twice is not None:
        return f"names the column {twice!r} twice"
    return "is not UTF-8" if _escaped_byte(columns) is not None else ""


def _repeated(columns: list[str]) -> str | None:
    return next((column for column in sorted(columns) if columns.count(column) > 1), None)


def _records(reader: Any, *, lines: "_Lines", columns: list[str], name: str) -> Iterator[RawRow | Refused]:
    while True:
        number = lines.number + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield Refused("not_csv", place_of(number, unit="line", file=name), f"is not CSV: {error}; mend the line.")
            continue
        if lines.stream.damage and (lines.is_over or not lines.last_is_whole):
            return  # a part of a record; the caller reports the cut
        if values:
            yield _record(values, columns=columns, lines=lines, name=name, number=number)


def _record(values: list[str], *, columns: list[str], lines: "_Lines", name: str, number: int) -> RawRow | Refused:
    place = place_of(number, unit="line", file=name)
    if lines.is_over:  # only a record that goes on asks for a line after the last
        message = f"opens a quotation that is not closed by the end of the file, line {lines.number}; close it."
        return Refused("not_csv", place, message)
    if len(values) != len(columns):
        message = f"has {len(values)} fields where the file has {len(columns)} columns; mend or remove the record."
        return Refused("wrong_columns", place, message)
    byte = _escaped_byte(values)
    if byte is not None:
        return Refused("not_utf8", place, f"is not UTF-8: it holds the byte 0x{byte:02x}; convert the file to UTF-8.")
    return RawRow(dict(zip(columns, values, strict=True)), name, "line", number)


def _escaped_byte(values: list[str]) -> int | None:
    """The first byte that is not UTF-8; PEP 383 keeps it as a lone surrogate."""
    text = "".join(values)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return ord(text[error.start]) - 0xDC00
    return None


class _Lines:
    """Lines with their ends, counted."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        buffered = io.BufferedReader(ReadableStream(stream), buffer_size=1 << 20)
        self._file = io.TextIOWrapper(buffered, encoding="utf-8-sig", errors="surrogateescape", newline="")
        self.number = 0
        self.last_is_whole = True
        self.is_over = False
        """Whether a line was asked for when there was none left."""

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self._file.readline()
        if not line:
            self.is_over = True
            raise StopIteration
        self.number += 1
        self.last_is_whole = line.endswith(("\n", "\r"))
        return line


def read_parquet(url: str, *, name: str) -> Iterator[RawRow | Refused]:
    """Rows of a .parquet file, a few MiB of them in memory at a time.

    Raises:
        UnreadableError: the disk or the network failed.
    """
    number = 0
    with open_binary(url) as opened:
        watched = WatchedFile(opened)
        try:
            file = pyarrow.parquet.ParquetFile(watched, page_checksum_verification=True)
            twice = _repeated(file.schema_arrow.names)
            if twice is not None:
                yield Refused("not_parquet", name, f"names the column {twice!r} twice; the file is not read; mend it.")
                return
            for batch in file.iter_batches(batch_size=_batch_rows(file.metadata)):
                for fields in _rows_of(batch):
                    number += 1
                    if isinstance(fields, Exception):
                        place = place_of(number, unit="row", file=name)
                        message = f"cannot be read ({type(fields).__name__}: {fields}); write the file again."
                        yield Refused("unreadable", place, message)
                    else:
                        yield RawRow(fields, name, "row", number)
            if number != file.metadata.num_rows:
                raise pyarrow.ArrowInvalid(f"its footer speaks of {file.metadata.num_rows} rows")
        except Exception as error:  # damage makes pyarrow raise a dozen types, of Arrow and of Python
            watched.require_read()
            message = f"is not a readable parquet file after {number} rows: {error}; download it again."
            yield Refused("not_parquet" if number == 0 else "truncated", name, message)


def _batch_rows(metadata: Any) -> int:
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    row_bytes = max((group.total_byte_size / max(group.num_rows, 1) for group in groups), default=0)
    return int(min(max(PARQUET_BATCH_BYTES / max(row_bytes, 1), 1), PARQUET_BATCH_ROWS))


def _rows_of(batch: Any) -> Iterator[dict[str, Any] | Exception]:
    try:
        yield from batch.to_pylist()
        return
    except (ValueError, OverflowError, pyarrow.ArrowException):
        pass  # bytes that are no UTF-8, a time out of range: find the rows
    for index in range(batch.num_rows):
        try:
            yield batch.slice(index, 1).to_pylist()[0]
        except (ValueError, OverflowError, pyarrow.ArrowException) as error:
            yield error
