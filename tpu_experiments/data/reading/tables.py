"""Rows of tables: .csv, .tsv and .parquet."""

import csv
import functools
import io
import logging
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import pyarrow
import pyarrow.parquet

from tpu_experiments.data.documents import Refused, SourceSpec, beginning
from tpu_experiments.data.reading.raw_rows import MOST_ROW_BYTES, RawRow, cut_off, place_of, too_long
from tpu_experiments.storage.streams import ByteStream, ReadableStream, WatchedFile, open_binary

log = logging.getLogger(__name__)

HEAD_CHARACTERS = 4 << 20
"""Characters of a .csv or .tsv that are examined to guess its quoting; about 0.1 s of work."""
MIN_WHOLE_LINES = 4
"""Lines inside quotations, each with all the columns, from which they count as rows of a .csv, not as prose with
commas."""
PARQUET_BATCH_BYTES = 8 << 20
PARQUET_BATCH_ROWS = 1000


def read_table(
    stream: ByteStream, *, name: str, delimiter: str, spec: SourceSpec | None = None
) -> Iterator[RawRow | Refused]:
    """Yield the records of a .csv or .tsv with a header line; quoting follows `spec.quoting`.

    A .csv with a semicolon-separated header, as Excel writes it in most of Europe, is read with that delimiter. A
    record is numbered by its first line. For an unreadable record that spans several lines, every line is a Refused.
    """
    csv.field_size_limit(sys.maxsize)  # the default is 128 KiB
    lines = _Lines(stream, name=name)
    first_line = next((line for line in lines if line.strip("\r\n")), "")
    if delimiter == "," and ";" in first_line and "," not in first_line:
        delimiter = ";"
    dialect = _dialect_of(first_line, lines=lines, delimiter=delimiter, name=name, spec=spec)
    reader = csv.reader(chain([first_line], lines), delimiter=delimiter, quoting=dialect.quoting)
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
    yield from _records(reader, lines=lines, columns=columns, name=name, dialect=dialect)
    if stream.damage:
        yield cut_off(place_of(lines.number + lines.last_is_whole, unit="line", file=name), damage=stream.damage)


@dataclass(frozen=True)
class _Dialect:
    """Delimiter and quoting of a file."""

    delimiter: str
    quoting: Literal[0, 3]
    """csv.QUOTE_MINIMAL or csv.QUOTE_NONE."""
    is_guessed: bool
    remedy: str
    """Advice for the error message where the guess is wrong."""


def _dialect_of(first_line: str, *, lines: "_Lines", delimiter: str, name: str, spec: SourceSpec | None) -> _Dialect:
    key = f"data.{spec.name}.quoting" if spec else "quoting"
    asked = spec.quoting if spec else "auto"
    remedy = f"set {key}=none if quotation marks are plain characters there"
    if asked != "auto":
        return _Dialect(delimiter, csv.QUOTE_NONE if asked == "none" else csv.QUOTE_MINIMAL, False, remedy)
    head = [first_line, *lines.look_ahead(HEAD_CHARACTERS)]
    bad_quoted, bad_plain = _bad_lines(head, delimiter=delimiter, is_whole=lines.is_at_end)
    if bad_plain >= bad_quoted:
        return _Dialect(delimiter, csv.QUOTE_MINIMAL, True, remedy)
    _log_once(
        f"{spec.key if spec else ''}; {name}: quotation marks are read as plain characters ({key}=auto); surrounding "
        f"fields, they would leave {bad_quoted} of {len(head)} lines without the columns of the file, so {bad_plain}"
    )
    return _Dialect(delimiter, csv.QUOTE_NONE, True, remedy)


@functools.cache
def _log_once(sentence: str) -> None:
    """Log a sentence once; a file may be read more than once."""
    log.info(sentence)


def _bad_lines(head: list[str], *, delimiter: str, is_whole: bool) -> tuple[int, int]:
    """Count the lines that contradict quoted fields, and those that contradict plain quotation marks.

    Against quoting: lines of records that violate RFC 4180 or have another number of fields than the header. A record
    of several lines counts too where one of its further lines has all the columns: at once in a .tsv, since fields hold
    no tabs as prose holds commas; in a .csv when all lines of the file have them and `MIN_WHOLE_LINES` are inside of
    such records. Against plain marks: lines with another number of fields, and records that only quoting explains.
    """
    if not any('"' in line for line in head):
        return 0, 0
    plain = [line.count(delimiter) + 1 for line in head]
    columns = next(csv.reader(head[:1], delimiter=delimiter, quoting=csv.QUOTE_NONE), [])
    try:
        if next(csv.reader(head[:1], delimiter=delimiter, strict=True), []) != columns:
            return 0, 1  # the header's names are quoted
    except csv.Error as error:
        return (0, 1) if _is_open(error) else (1, 0)  # open: a quoted name that spans several lines
    width, bad_quoted, swallowed = len(columns), 0, 0
    bad_plain = sum(fields != width for fields, line in zip(plain, head, strict=True) if line.strip("\r\n"))
    for first, last, values in _strict_records(head, delimiter=delimiter, is_whole=is_whole):
        is_over_several = last - first > 1
        whole = plain[first + 1 : last].count(width) if width > 1 else 0
        is_tab = delimiter == "\t"
        is_wrong = values is not None and len(values) != width and (is_tab or not is_over_several)
        if values is None or is_wrong or (whole and is_tab):
            bad_quoted += last - first
        elif whole:
            swallowed += whole
        elif is_over_several and width == 1:
            bad_plain += last - first
        elif len(values) == width and any('""' in line for line in head[first:last]):
            bad_plain += 1
    if bad_plain == 0 and swallowed >= MIN_WHOLE_LINES:
        bad_quoted += swallowed
    return bad_quoted, bad_plain


def _strict_records(head: list[str], *, delimiter: str, is_whole: bool) -> Iterator[tuple[int, int, list[str] | None]]:
    """Yield (first line, line after the last, fields) of each record; fields are None if misquoted."""
    reader = csv.reader(iter(head), delimiter=delimiter, strict=True)
    first = 0
    while True:
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            # A record may continue after the head; in a file of one column it may also be a text cut at the end.
            if not _is_open(error) or (is_whole and delimiter in head[0]):
                yield first, reader.line_num, None
        else:
            if values:
                yield first, reader.line_num, values
        first = reader.line_num


def _is_open(error: csv.Error) -> bool:
    """Return whether the error is a quotation that is not closed by the end."""
    return "unexpected end of data" in str(error)


def _trouble_with(columns: list[str]) -> str:
    twice = _repeated(columns)
    if twice is not None:
        return f"names the column {twice!r} twice"
    return "is not UTF-8" if _escaped_byte(columns) is not None else ""


def _repeated(columns: list[str]) -> str | None:
    return next((column for column in sorted(columns) if columns.count(column) > 1), None)


def _records(
    reader: Any, *, lines: "_Lines", columns: list[str], name: str, dialect: _Dialect
) -> Iterator[RawRow | Refused]:
    while True:
        number = lines.start_record()
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
            row = _record(values, columns=columns, lines=lines, name=name, number=number, dialect=dialect)
            if not isinstance(row, Refused):
                yield row
                continue
            first, *others = lines.record
            yield replace(row, text=beginning(first))
            # The further lines may be rows that the quotation swallowed, so each is counted.
            for inside, line in enumerate(others, start=number + 1):
                place, message = place_of(inside, unit="line", file=name), f"is inside the record of line {number}."
                yield Refused(row.reason, place, message, text=beginning(line))


def _record(
    values: list[str], *, columns: list[str], lines: "_Lines", name: str, number: int, dialect: _Dialect
) -> RawRow | Refused:
    place = place_of(number, unit="line", file=name)
    if lines.is_over:  # only an unfinished record requests a line after the last
        message = f"opens a quotation that is not closed by the end of the file, line {lines.number}; close it"
        return Refused("not_csv", place, f"{message}, or {dialect.remedy}.")
    over = f", read as one record up to line {lines.number} for its quotation mark" if lines.number > number else ""
    if len(values) != len(columns):
        has_mark = dialect.quoting == csv.QUOTE_MINIMAL and any('"' in line for line in lines.record)
        message = f"has {len(values)} fields where the file has {len(columns)} columns{over}; mend or remove the record"
        return Refused("wrong_columns", place, message + (f", or {dialect.remedy}." if has_mark else "."))
    is_tab = dialect.delimiter == "\t" and len(columns) > 1
    if is_tab and dialect.is_guessed and any(line.count("\t") + 1 == len(columns) for line in lines.record[1:]):
        message = f"has lines that have all the columns{over}; {dialect.remedy}, or to minimal if they are not."
        return Refused("quotation", place, message)
    byte = _escaped_byte(values)
    if byte is not None:
        return Refused("not_utf8", place, f"is not UTF-8: it holds the byte 0x{byte:02x}; convert the file to UTF-8.")
    return RawRow(dict(zip(columns, values, strict=True)), name, "line", number)


def _escaped_byte(values: list[str]) -> int | None:
    """Return the first byte that is not UTF-8; PEP 383 decodes it as a lone surrogate."""
    text = "".join(values)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return ord(text[error.start]) - 0xDC00
    return None


class _Lines:
    """Lines with their line ends, counted.

    Raises:
        ConfigError: on reading: a line or a record is larger than any text.
    """

    def __init__(self, stream: ByteStream, *, name: str) -> None:
        self.stream, self._name = stream, name
        buffered = io.BufferedReader(ReadableStream(stream), buffer_size=1 << 20)
        self._file = io.TextIOWrapper(buffered, encoding="utf-8-sig", errors="surrogateescape", newline="")
        self.number = 0
        self.last_is_whole = True
        self.is_over = False
        """Whether a line was requested when none was left."""
        self.record: list[str] = []
        """The lines since `start_record`."""
        self._num_held = 0
        self._ahead: deque[str] = deque()
        self.is_at_end = False
        """Whether looking ahead has reached the end."""

    def look_ahead(self, num_characters: int) -> list[str]:
        """Return about that many characters of the next lines without consuming them."""
        held = 0
        while held < num_characters and not self.is_at_end:
            line = self._read_line()
            self.is_at_end = not line
            held += len(line)
            if line:
                self._ahead.append(line)
        return list(self._ahead)

    def start_record(self) -> int:
        """Return the number of the line that the next record begins in."""
        self.record.clear()
        self._num_held = 0
        return self.number + 1

    def _read_line(self) -> str:
        line = self._file.readline(MOST_ROW_BYTES)
        if len(line) == MOST_ROW_BYTES:
            raise too_long(place_of(self.number + len(self._ahead) + 1, unit="line", file=self._name))
        return line

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self._ahead.popleft() if self._ahead else self._read_line()
        if not line:
            self.is_over = True
            raise StopIteration
        self.number += 1
        self.record.append(line)
        self._num_held += len(line)
        if self._num_held > MOST_ROW_BYTES:
            raise too_long(place_of(self.number, unit="line", file=self._name))
        self.last_is_whole = line.endswith(("\n", "\r"))
        return line


def read_parquet(url: str, *, name: str) -> Iterator[RawRow | Refused]:
    """Yield the rows of a .parquet file, with a few MiB of them in memory at a time.

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
        pass  # bytes that are not UTF-8, a time out of range: convert row by row to find the bad ones
    for index in range(batch.num_rows):
        try:
            yield batch.slice(index, 1).to_pylist()[0]
        except (ValueError, OverflowError, pyarrow.ArrowException) as error:
            yield error
