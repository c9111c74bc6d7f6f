"""Cleaned documents as parquet, a file for each block: to look at, and to prepare again with another tokenizer."""

import io
from collections.abc import Sequence

import pyarrow
import pyarrow.parquet

from tpu_experiments.data.documents import Document
from tpu_experiments.io import paths

_TURN = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string()), ("train", pyarrow.bool_())])
SCHEMA = pyarrow.schema(
    [
        ("id", pyarrow.string()),
        ("text", pyarrow.string()),
        ("messages", pyarrow.list_(_TURN)),
        ("source", pyarrow.string()),
        ("place", pyarrow.string()),
    ]
)
"""Exactly one of `text` and `messages` is set; `train` is false of an answer that is not learnt, else null; `place`
says where the document was read."""


def _turns(document: Document) -> list[dict[str, str | bool | None]]:
    return [
        {"role": role, "content": content, "train": False if turn in document.context else None}
        for turn, (role, content) in enumerate(document.messages or ())
    ]


def write_documents(documents: Sequence[Document], *, folder: str, name: str, source: str) -> None:
    """Write `<folder>/<name>.parquet`, whole or not at all; read it back with `format: auto`."""
    paths.make_dirs(folder)
    rows = [
        {
            "id": document.id,
            "text": document.text,
            "messages": _turns(document) if document.messages else None,
            "source": source,
            "place": document.place,
        }
        for document in documents
    ]
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=SCHEMA), buffer, compression="zstd")
    paths.write_bytes_atomic(paths.join(folder, f"{name}.parquet"), buffer.getvalue())
