"""The default reader of sources: Documents from local or remote files, or from a Hub id."""

from collections.abc import Collection, Generator, Iterator, Sequence
from itertools import chain, islice

from tpu_experiments.data.documents import Document, Refused, SourceSpec, no_document
from tpu_experiments.data.reading.files import read_raw
from tpu_experiments.data.reading.formats import document_of, field_of
from tpu_experiments.data.reading.hub import HubRows
from tpu_experiments.data.reading.locations import SourceFile, list_files
from tpu_experiments.data.reading.raw_rows import RawRow
from tpu_experiments.data.reading.recognition import recognise

RawRows = Generator[RawRow | Refused]


def read_documents(spec: SourceSpec) -> Iterator[Document | Refused]:
    """Yield documents in file order, and a Refused for every other row.

    At most `spec.max_documents` rows are read.

    Raises:
        ConfigError: there is no such source, it cannot be read, it is empty, or `format: auto` does not recognise it.
    """
    rows = SourceRows(spec, files=list_files(spec))
    spec = rows.resolve_format()
    num_rows = 0
    for row in islice(chain.from_iterable(rows.by_file()), spec.max_documents):
        yield document_of(row, spec=spec) if isinstance(row, RawRow) else row
        num_rows += 1
    if num_rows == 0:
        raise no_document(spec)


def field_values(
    spec: SourceSpec, *, files: Sequence[SourceFile], field: str, places: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    """Return a field's values, as text, by place, and the names of the first such row's fields.

    Args:
        places: places of the rows to read (`RawRow.place`).

    Raises:
        ConfigError: the source cannot be read.
    """
    found: dict[str, str] = {}
    names: list[str] = []
    for row in chain.from_iterable(SourceRows(spec, files=files).by_file()):
        if isinstance(row, RawRow) and row.place in places:
            value, fields = field_of(row, field)
            names = names or fields
            if value is not None:
                found[row.place] = value
    return found, names


class SourceRows:
    """Raw rows of a source, file by file, or of the Hub where `list_files` found no file.

    Each file is opened once: the rows that `resolve_format` consumes are kept for the reading.

    Raises:
        ConfigError: from every method, where the source cannot be read.
    """

    def __init__(self, spec: SourceSpec, *, files: Sequence[SourceFile]) -> None:
        self._spec = spec
        self._files = files
        self._open: list[RawRows] | None = None
        self._seen: list[list[RawRow | Refused]] = []

    def resolve_format(self) -> SourceSpec:
        """Return the spec with the format of the first readable rows; unchanged where it names a format.

        Raises:
            ConfigError: the source is empty, or its rows are of no format, of several, or of another kind.
        """
        return recognise(self._first(), spec=self._spec)

    def by_file(self) -> Iterator[Iterator[RawRow | Refused]]:
        """Yield an iterator of rows for each file; can be called once."""
        for number, rows in enumerate(self._opened()):
            seen = self._seen[number] if number < len(self._seen) else []
            yield chain(seen, rows)

    def close(self) -> None:
        """Close all open readers."""
        for rows in self._open or []:
            rows.close()

    def _first(self) -> Iterator[RawRow | Refused]:
        for rows in self._opened():
            self._seen.append([])
            for row in rows:
                self._seen[-1].append(row)
                yield row

    def _opened(self) -> list[RawRows]:
        if self._open is None:
            hub = None if self._files else HubRows(self._spec)
            files = self._files if hub is None else hub.files
            self._open = [read_raw(file, spec=self._spec) for file in files]
            if hub is not None and not files:
                self._open = [hub.stream()]
        return self._open
