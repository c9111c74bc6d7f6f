"""The reader of every shipped source: a local file, a folder of files, or a Hub id -> Documents."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.documents import Document, SourceSpec, no_document
from tpu_experiments.data.files import READER_OF_SUFFIX, read_file
from tpu_experiments.data.formats import Row, document_of
from tpu_experiments.data.hub import read_hub
from tpu_experiments.data.paths import find_local, near_misses

_SUPPORTED = ".jsonl, .json or .parquet"
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz")
OTHER_DATA = (".csv", ".tsv", ".txt", ".arrow")
HUB_METADATA = ("dataset_info.json", "dataset_infos.json")
"""Files of a downloaded data set that describe it and hold no row."""


def read_documents(spec: SourceSpec) -> Iterator[Document]:
    """Documents in file order, at most `spec.max_documents`.

    A row with nothing to read (blank text, fewer than two turns) gives a document that `is_empty`,
    so that the caller can count it.

    Raises:
        ConfigError: there is no such source, it is empty, or a row is not of `spec.format`.
    """
    num_documents = 0
    for row in islice(_rows(spec), spec.max_documents):
        yield document_of(row, spec=spec)
        num_documents += 1
    if num_documents == 0:
        raise no_document(spec)


def _rows(spec: SourceSpec) -> Iterator[Row]:
    local = find_local(spec.path)
    if local is None:
        _require_hub_id(spec)
        yield from read_hub(spec)
    elif local.is_dir():
        for path in _data_files(local, spec=spec):
            name = path.relative_to(local).as_posix()
            yield from read_file(path, name=name, key=spec.key)
    else:
        _require_readable(local, spec=spec)
        yield from read_file(local, name=local.name, key=spec.key)


def _require_hub_id(spec: SourceSpec) -> None:
    """Raise when `path` is not there and can only have meant a file or folder."""
    if "://" in spec.path:
        raise ConfigError(
            f"{spec.key}; addresses are not read; download the data and point data.{spec.name}.path= at its folder."
        )
    suffixes = (*READER_OF_SUFFIX, *COMPRESSED, *OTHER_DATA)
    if spec.path.startswith((".", "/", "~")) or spec.path.lower().endswith(suffixes):
        raise ConfigError(
            f"{spec.key}; there is no such file or folder. {near_misses(spec.path)}"
            f"Point data.{spec.name}.path= at a {_SUPPORTED} file, a folder of them, or a Hub id."
        )


def _require_readable(path: Path, *, spec: SourceSpec) -> None:
    suffix = path.suffix.lower()
    if suffix in COMPRESSED:
        raise ConfigError(
            f"{spec.key}; compressed files ({suffix}) are not supported yet; unpack it and point "
            f"data.{spec.name}.path= at the {_SUPPORTED} file inside."
        )
    if suffix not in READER_OF_SUFFIX:
        raise ConfigError(f"{spec.key}; the suffix {suffix!r} is not supported; convert the file to {_SUPPORTED}.")


def _data_files(folder: Path, *, spec: SourceSpec) -> list[Path]:
    """All data files below the folder, sorted by name; hidden ones are the Hub client's."""
    inside = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.name not in HUB_METADATA
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    files = [path for path in inside if path.suffix.lower() in READER_OF_SUFFIX]
    if not files:
        held = ", ".join(path.name for path in inside[:5]) or "nothing"
        raise ConfigError(
            f"{spec.key}; the folder holds no {_SUPPORTED} file among its {len(inside)} files "
            f"({held}); point data.{spec.name}.path= at a folder with data."
        )
    return files
