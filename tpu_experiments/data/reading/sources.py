"""The reader of every shipped source: files, local or remote, or a Hub id -> Documents."""

from collections.abc import Iterator, Sequence
from itertools import islice

from tpu_experiments.data.documents import Document, Refused, SourceSpec, no_document
from tpu_experiments.data.reading.files import read_raw
from tpu_experiments.data.reading.formats import document_of
from tpu_experiments.data.reading.hub import read_hub
from tpu_experiments.data.reading.locations import SourceFile, list_files
from tpu_experiments.data.reading.raw_rows import RawRow
from tpu_experiments.data.reading.recognise import recognise


def read_documents(spec: SourceSpec) -> Iterator[Document | Refused]:
    """Documents in file order, from at most `spec.max_documents` rows; a Refused for every other row.

    Raises:
        ConfigError: there is no such source, it cannot be read, it is empty, or `format: auto` does not recognise it.
    """
    files = list_files(spec)
    spec = resolve_format(spec, files=files)
    num_rows = 0
    for row in islice(read_rows(spec, files=files), spec.max_documents):
        yield document_of(row, spec=spec) if isinstance(row, RawRow) else row
        num_rows += 1
    if num_rows == 0:
        raise no_document(spec)


def read_rows(spec: SourceSpec, *, files: Sequence[SourceFile]) -> Iterator[RawRow | Refused]:
    """All raw rows of a source, file after file; of the Hub where `list_files` found none.

    Raises:
        ConfigError: the source cannot be read.
    """
    if not files:
        yield from read_hub(spec)
    for file in files:
        yield from read_raw(file, spec=spec)


def resolve_format(spec: SourceSpec, *, files: Sequence[SourceFile]) -> SourceSpec:
    """`spec` with the format that its first readable rows are in; as it is when it names one.

    Raises:
        ConfigError: the source cannot be read, is empty, or its rows are of no format, of several, or of another kind.
    """
    return recognise(read_rows(spec, files=files), spec=spec)
