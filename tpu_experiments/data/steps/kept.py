"""Cleaned documents as parquet, a file for each block: to look at, and to prepare again with another tokenizer."""

import io
from collections.abc import Iterable, Sequence

import pyarrow
import pyarrow.parquet

from tpu_experiments.data.documents import Document
from tpu_experiments.io import paths

_TURN = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
SCHEMA = pyarrow.schema(
    [
        ("id", pyarrow.string()),
        ("text", pyarrow.string()),
        ("messages", pyarrow.list_(_TURN)),
        ("source", pyarrow.string()),
        ("place", pyarrow.string()),
    ]
)
"""Exactly one of `text` and `messages` is set; `place` says where the document was read."""


def write_documents(documents: Sequence[Document], *, folder: str, name: str, source: str) -> None:
    """Write `<folder>/<name>.parquet`, whole or not at all; read it back with `format: auto`."""
    paths.make_dirs(folder)
    rows = [
        {
            "id": document.id,
            "text": document.text,
            "messages": [{"role": r, "content": c} for r, c in document.messages] if document.messages else None,
            "source": source,
            "place": document.place,
        }
        for document in documents
    ]
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=SCHEMA), buffer, compression="zstd")
    paths.write_bytes_atomic(_path(folder, name), buffer.getvalue())


def are_kept(names: Iterable[str], folder: str) -> bool:
    """Whether the documents of all these blocks are there; each file is whole or absent."""
    return all(paths.exists(_path(folder, name)) for name in names)


def _path(folder: str, name: str) -> str:
    return paths.join(folder, f"{name}.parquet")
