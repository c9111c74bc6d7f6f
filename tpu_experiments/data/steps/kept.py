"""Cleaned documents as parquet, a file for each block: to look at, and to prepare again with another tokenizer."""

import io
import json
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import pyarrow
import pyarrow.parquet

from tpu_experiments.data.documents import Document
from tpu_experiments.io import paths

_TURN = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string()), ("train", pyarrow.bool_())])
_TOOL_TURN = pyarrow.struct([*_TURN, *((name, pyarrow.string()) for name in ("tool_calls", "name", "tool_call_id"))])
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
TOOL_SCHEMA = SCHEMA.set(2, pyarrow.field("messages", pyarrow.list_(_TOOL_TURN))).append(
    pyarrow.field("tools", pyarrow.string())
)
"""Of a file with conversations that use tools; calls and tools are JSON."""


def write_documents(documents: Sequence[Document], *, folder: str, name: str, source: str) -> None:
    """Write `<folder>/<name>.parquet`, whole or not at all; read it back with `format: auto`."""
    paths.make_dirs(folder)
    rows = [
        {
            "id": document.id,
            "text": document.text,
            "messages": _turns(document),
            "source": source,
            "place": document.place,
            "tools": document.tools or None,
        }
        for document in documents
    ]
    schema = TOOL_SCHEMA if any(document.uses_tools for document in documents) else SCHEMA
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), buffer, compression="zstd")
    paths.write_bytes_atomic(_path(folder, name), buffer.getvalue())


def _turns(document: Document) -> list[dict[str, str | bool | None]] | None:
    turns = []
    for turn, ((role, content), extra) in enumerate(zip_longest(document.messages or (), document.extras)):
        beside = json.loads(extra) if extra else {}
        if "tool_calls" in beside:
            beside["tool_calls"] = json.dumps(beside["tool_calls"], ensure_ascii=False)
        turns.append({"role": role, "content": content, "train": False if turn in document.context else None, **beside})
    return turns or None


def are_kept(names: Iterable[str], folder: str) -> bool:
    """Whether the documents of all these blocks are there; each file is whole or absent."""
    return all(paths.exists(_path(folder, name)) for name in names)


def _path(folder: str, name: str) -> str:
    return paths.join(folder, f"{name}.parquet")
