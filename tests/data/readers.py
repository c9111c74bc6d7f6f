"""Short ways to read a source in tests."""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from tpu_experiments.data.documents import Document, Refused, SourceSpec
from tpu_experiments.data.reading.locations import SourceFile, list_files
from tpu_experiments.data.reading.raw_rows import RawRow
from tpu_experiments.data.reading.sources import SourceRows, read_documents

TEXTS = ["Bună ziua.", "Două\nrânduri", "„ghilimele” și ș ț"]


def spec_for(path: Any, **values: Any) -> SourceSpec:
    return SourceSpec(**({"name": "x", "path": str(path), "format": "text"} | values))


def read(path: Any, **values: Any) -> list[Document | Refused]:
    return list(read_documents(spec_for(path, **values)))


def texts_of(path: Any, **values: Any) -> list[str | None]:
    """Texts of a source that has no refused row."""
    rows = read(path, **values)
    assert not [row for row in rows if isinstance(row, Refused)]
    return [row.text for row in rows if isinstance(row, Document)]


def split_rows(path: Any, **values: Any) -> tuple[list[Document], list[Refused]]:
    rows = read(path, **values)
    documents = [row for row in rows if isinstance(row, Document)]
    refused = [row for row in rows if isinstance(row, Refused)]
    assert len(documents) + len(refused) == len(rows)
    assert all(row.reason and row.place and row.message.encode() for row in refused)
    return documents, refused


def raw(path: Any) -> list[RawRow | Refused]:
    return list(rows_of(spec_for(path)))


def rows_of(spec: SourceSpec) -> Iterator[RawRow | Refused]:
    return chain.from_iterable(SourceRows(spec, files=list_files(spec)).by_file())


def recognised(spec: SourceSpec) -> SourceSpec:
    return SourceRows(spec, files=list_files(spec)).resolve_format()


def file_at(path: Path) -> SourceFile:
    return SourceFile(path.name, str(path))


def jsonl(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path
