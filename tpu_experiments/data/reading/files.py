"""Raw rows of one file, by its suffix, in order and in bounded memory.

A row that cannot be parsed becomes one Refused; a truncated file yields its whole rows and then one Refused. At most
one line, one array element or one parquet batch is in memory.

.jsonl .ndjson  an object a line; the line is parsed later, in a worker process
.json      an array of objects, by itself or as `data` of an object, or one object a line
.parquet   a row
.csv .tsv  a record; the first line names the columns
.txt       a line is a document, in the field `text` (as with Hugging Face's loader `text`)
(none)     as one of these, compressed or not, if its first bytes show which
"""

import codecs
import hashlib
from collections.abc import Generator, Iterable, Iterator
from itertools import chain, islice

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.documents import Refused, SourceSpec
from tpu_experiments.data.reading.json_array import read_array, wrapped_at
from tpu_experiments.data.reading.locations import TABLES, SourceFile, content_suffixes
from tpu_experiments.data.reading.raw_rows import MOST_ROW_BYTES, RawRow, cut_off, not_utf8, place_of, too_long
from tpu_experiments.data.reading.tables import read_parquet, read_table
from tpu_experiments.storage import paths
from tpu_experiments.storage.paths import is_remote
from tpu_experiments.storage.streams import SUFFIXES, ByteStream, UnreadableError

HEAD_BYTES = 2**20  # of a .json file that is one object, searched for its array of rows
CONTENT_MARKS = ("md5Hash", "crc32c", "content_hash", "etag", "ETag", "generation", "mtime", "LastModified")
"""Metadata by which file systems identify an object's content, the most reliable first."""


def read_raw(file: SourceFile, *, spec: SourceSpec) -> Generator[RawRow | Refused]:
    """Yield the rows of one file.

    Raises:
        ConfigError: the disk, the network or a permission stopped the reading; never for the file's content.
    """
    num_rows = 0
    try:
        for row in _rows(file, spec=spec):
            num_rows += 1
            yield row
    except UnreadableError as error:
        raise ConfigError(
            f"{spec.key}; reading {file.url} failed after {num_rows} rows ({error}); see that the file can be read and "
            "start again."
        ) from error


def fingerprint(file: SourceFile) -> str:
    """Return an identifier of a file's content: its SHA-256, or the checksum that an object store reports.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        about = paths.remote_info(file.url) if is_remote(file.url) else {}
        mark = next((f"{name}={about[name]}" for name in CONTENT_MARKS if about.get(name)), None)
        return _sha256(file.url) if mark is None else f"size={about.get('size')} {mark}"
    except Exception as error:  # every file system and its client raise types of their own
        raise ConfigError(
            f"{file.url}; it cannot be read ({type(error).__name__}: {error}); check that it is there, and the "
            "credentials if it is remote."
        ) from error


def _sha256(url: str) -> str:
    digest = hashlib.sha256()
    for chunk in ByteStream(url):
        digest.update(chunk)
    return f"sha256={digest.hexdigest()}"


def _rows(file: SourceFile, *, spec: SourceSpec) -> Iterator[RawRow | Refused]:
    data, compression = content_suffixes(file.name, file.url)
    if data == ".parquet":
        return read_parquet(file.url, name=file.name)
    stream = ByteStream(file.url, compression=SUFFIXES.get(compression))
    if data in TABLES:
        return read_table(stream, name=file.name, delimiter="," if data == ".csv" else "\t", spec=spec)
    if data == ".json":
        return _read_json(stream, name=file.name)
    return _read_lines(stream, chunks=_without_mark(stream), name=file.name, is_text=data == ".txt")


def _read_json(stream: ByteStream, *, name: str) -> Iterator[RawRow | Refused]:
    """Read an array of objects, or one object a line, told apart by the first character."""
    chunks, head, start = _without_mark(stream), [], b""
    while not start and (chunk := next(chunks, None)) is not None:
        head.append(chunk)
        start = chunk.lstrip(b" \t\r\n")[:1]
    if start == b"[":
        yield from read_array(stream, chunks=chain(head, chunks), name=name)
        return
    while start == b"{" and sum(map(len, head)) < HEAD_BYTES and (chunk := next(chunks, None)) is not None:
        head.append(chunk)
    whole = b"".join(head)
    array = wrapped_at(whole[:HEAD_BYTES]) if start == b"{" else None
    if array is not None:
        yield from read_array(stream, chunks=chain([whole[array:]], chunks), name=name, is_wrapped=True)
        return
    everything = chain([whole], chunks)
    rows = _read_lines(stream, chunks=everything, name=name)
    first = list(islice(rows, 2))
    if start and not any(_is_object(row) for row in first):
        message = (
            "is neither a JSON array of objects, nor an object with such an array as `data`, nor one object a line, "
            "and is not read; wrap its rows in [ ] "
        )
        yield Refused("not_json", name, message + "or write each on a line of its own.")
        return
    yield from chain(first, rows)


def _without_mark(stream: ByteStream) -> Iterator[bytes]:
    """Yield the bytes without the byte order mark that Windows programs write."""
    chunks, start = iter(stream), b""
    while len(start) < len(codecs.BOM_UTF8) and (chunk := next(chunks, None)) is not None:
        start += chunk
    yield start.removeprefix(codecs.BOM_UTF8)
    yield from chunks


def _is_object(row: RawRow | Refused) -> bool:
    line = row.data.strip() if isinstance(row, RawRow) and isinstance(row.data, bytes) else b""
    return line.startswith(b"{") and line.endswith(b"}")


def _read_lines(
    stream: ByteStream, *, chunks: Iterable[bytes], name: str, is_text: bool = False
) -> Iterator[RawRow | Refused]:
    number = 0
    for number, line in enumerate(_lines(stream, chunks=chunks, name=name), start=1):
        if not line or line.isspace():
            continue
        yield _text_row(line, name=name, number=number) if is_text else RawRow(line, name, "line", number)
    if stream.damage:
        yield cut_off(place_of(number + 1, unit="line", file=name), damage=stream.damage)


def _lines(stream: ByteStream, *, chunks: Iterable[bytes], name: str) -> Iterator[bytes]:
    """Yield lines without their line feeds, except a last line that is cut by damage.

    Raises:
        ConfigError: a line is larger than any text.
    """
    begun: list[bytes] = []
    num_bytes = number = 0
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        begun.append(first)
        num_bytes += len(first)
        if num_bytes > MOST_ROW_BYTES:
            raise too_long(place_of(number + 1, unit="line", file=name))
        if others:
            number += len(others)
            yield b"".join(begun)
            begun = [others.pop()]
            num_bytes = len(begun[0])
            yield from others
    rest = b"".join(begun)
    if rest and not stream.damage:
        yield rest


def _text_row(line: bytes, *, name: str, number: int) -> RawRow | Refused:
    try:
        return RawRow({"text": line.removesuffix(b"\r").decode()}, name, "line", number)
    except UnicodeDecodeError as error:
        return not_utf8(error, place=place_of(number, unit="line", file=name))
