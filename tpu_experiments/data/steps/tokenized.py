"""Tokenisation of a source into blocks: the first half of the preparation, shared by every row length.

<folder>/<source>-tokens-<key>/blocks/…      see data/steps/blocks.py; `-documents-` where they are only cleaned
                               blocks.json   their names, in order; written last
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, Literal

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.data_schema import DataSourceConfig, PrepareConfig
from tpu_experiments.data.documents import Document, Refused, SourceSpec, no_document, raise_if_bad
from tpu_experiments.data.prepared import NotPrepared, read_record
from tpu_experiments.data.reading.files import read_raw
from tpu_experiments.data.reading.locations import SourceFile, is_table
from tpu_experiments.data.reading.parts import Part, list_parts
from tpu_experiments.data.reading.raw_rows import RawRow
from tpu_experiments.data.reading.sources import SourceRows
from tpu_experiments.data.steps.blocks import (
    Block,
    BlockMaker,
    BlockSettings,
    Item,
    cut_blocks,
    documents_exist,
    is_whole,
    read_index,
)
from tpu_experiments.data.steps.keys import content_of_documents, content_of_files, format_of_content, tokens_key
from tpu_experiments.data.steps.workers import map_jobs
from tpu_experiments.storage import paths
from tpu_experiments.storage.process import PeakMemory
from tpu_experiments.storage.sealed import write_sealed_json

BLOCKS = "blocks.json"
Found = Literal["taken", "verified"]
Read = Callable[[SourceSpec], Iterator[Document | Refused]]
"""A reader of the user's own (`data.<name>._target_`)."""


@dataclass(frozen=True)
class TokenizedSource:
    """The complete blocks of one source, in order."""

    spec: SourceSpec
    key: str
    folder: str
    block_names: list[str] = field(repr=False)
    num_files: int
    own: frozenset[str]
    """Splits that have evaluation or test files of their own."""
    origins: dict[str, str]
    """Description of each split's origin, where it is not the split hash alone (data/reading/parts.py)."""
    seconds: float
    """Wall time of the process that finished the blocks."""
    peak_rss_gib: float


@dataclass(frozen=True)
class _Input:
    """A source's parts, with the readers of their rows."""

    parts: list[Part]
    rows: list[SourceRows]
    """Readers, one per part; empty where `read` is set."""
    read: Read | None

    @property
    def spec(self) -> SourceSpec:
        return self.parts[0].spec


def tokenize_source(
    spec: SourceSpec,
    *,
    source: DataSourceConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    settings: PrepareConfig,
    folder: str,
    read: Read | None,
    is_lookup: bool = False,
    found: Found = "taken",
) -> TokenizedSource:
    """Return the source's blocks, made now, completed, or reused.

    With `found="verified"` the checksums of existing blocks are verified, and damaged blocks are made again. With
    `tokenizer` None the documents are only cleaned, and their lengths are bytes (data/texts.py).

    Raises:
        NotPrepared: the blocks are not complete, and `is_lookup` forbids making any.
        ConfigError: a source that cannot be read or is empty, or a bad row with `on_bad_row: stop`.
    """
    found_parts = list_parts(spec, has_reader=read is not None)
    spec, source_input, content = _input_of(spec, found_parts.parts, read=read, folder=folder, is_lookup=is_lookup)
    has_tables = any(is_table(file.name) for file in found_parts.files)
    key = tokens_key(spec, source=source, content=content, tokenizer=tokenizer, has_tables=has_tables)
    target = paths.join(folder, f"{spec.name}-{'documents' if tokenizer is None else 'tokens'}-{key}")
    done = paths.join(target, BLOCKS)
    made = read_record(done, expected={"key": key}, is_lookup=is_lookup)
    if is_lookup and made is None:
        raise NotPrepared(spec.name)
    maker = BlockSettings(
        folder=target,
        spec=spec,
        clean=source.clean,
        is_signed=source.duplicates.near is not None,
        is_compared=source.duplicates.exact == "drop",
        tokenizer=tokenizer,
        documents_folder=paths.join(target, "documents") if settings.documents == "keep" else None,
    )
    if made is None or not _are_whole(made["blocks"], maker=maker, found=found, is_lookup=is_lookup):
        made = _make_all(source_input, maker=maker, settings=settings)
        write_sealed_json(done, {"key": key, **made})
    for each in source_input.rows:
        each.close()
    _require_good_rows(made["first_bad_row"], spec=spec)
    return TokenizedSource(
        spec=spec,
        key=key,
        folder=target,
        block_names=made["blocks"],
        num_files=len(found_parts.files),
        own=found_parts.own,
        origins=found_parts.origins,
        seconds=made["seconds"],
        peak_rss_gib=made["peak_rss_gib"],
    )


def _input_of(
    spec: SourceSpec, parts: list[Part], *, read: Read | None, folder: str, is_lookup: bool
) -> tuple[SourceSpec, _Input, list[str]]:
    """Return the source and its parts in the format of the first one, and the fingerprints of their rows."""
    rows = [] if read else [SourceRows(part.spec, files=part.files) for part in parts]
    contents = [_content(part, read=read, folder=folder) for part in parts]
    if rows:
        resolve = rows[0].resolve_format
        spec = format_of_content(spec, content=contents[0], folder=folder, recognise=resolve, is_lookup=is_lookup)
    source_input = _Input([_with_format(part, like=spec) for part in parts], rows, read)
    return spec, source_input, [line for lines in contents for line in lines]


def _are_whole(names: list[str], *, maker: BlockSettings, found: Found, is_lookup: bool) -> bool:
    """Return whether existing blocks, and the document files that are wanted beside them, can be used."""
    if found == "verified" and not all(is_whole(maker.folder, name) for name in names):
        return False
    return maker.documents_folder is None or is_lookup or documents_exist(names, maker.documents_folder)


def _with_format(part: Part, *, like: SourceSpec) -> Part:
    """Give a part the format of the first one."""
    return replace(part, spec=replace(part.spec, format=like.format, fields=like.fields))


def _content(part: Part, *, read: Read | None, folder: str) -> list[str]:
    """Return the fingerprints of a part's rows, prefixed with its split if it has one."""
    if read is None:
        content = content_of_files(part.files, spec=part.spec, folder=folder)
    else:
        content = content_of_documents(lambda: read(part.spec))
    return content if part.split is None else [f"{part.split} {line}" for line in content]


def _make_all(source_input: _Input, *, maker: BlockSettings, settings: PrepareConfig) -> dict[str, Any]:
    """Make the missing blocks; return the content of blocks.json."""
    paths.make_dirs(paths.join(maker.folder, "blocks"))
    names: list[str] = []
    bad: Refused | None = None
    started = time.perf_counter()
    with PeakMemory() as memory:
        for name, first_bad_row in _make_blocks(source_input, maker=maker, settings=settings):
            bad = bad or first_bad_row
            _require_good_rows(vars(bad) if bad else None, spec=source_input.spec)
            names.append(name)
    _require_parts(names, source_input=source_input, folder=maker.folder)
    return {
        "blocks": names,
        "first_bad_row": vars(bad) if bad else None,
        "seconds": time.perf_counter() - started,
        "peak_rss_gib": memory.gib,
    }


def _require_parts(names: list[str], *, source_input: _Input, folder: str) -> None:
    """Raise unless every part has a row."""
    if not names:
        raise no_document(source_input.spec)
    found = {read_index(folder, name).split for name in names} if len(source_input.parts) > 1 else {None}
    for part in source_input.parts:
        if part.split not in found:
            raise no_document(part.spec)


def _require_good_rows(first_bad_row: dict[str, Any] | None, *, spec: SourceSpec) -> None:
    """Stop at the first bad row where `on_bad_row` says so.

    Checked for reused blocks too, which may have been made under the other setting.
    """
    if first_bad_row is not None:
        raise_if_bad(Refused(**first_bad_row), spec=spec)


def _make_blocks(
    source_input: _Input, *, maker: BlockSettings, settings: PrepareConfig
) -> Iterator[tuple[str, Refused | None]]:
    """Yield the name of each block once it is complete, with its first bad row."""
    engine, workers = settings.engine, settings.workers
    made: Iterator[list[str]]
    if engine == "ray" and all(part.files for part in source_input.parts) and source_input.spec.max_documents is None:
        files = (file for part in source_input.parts for file in part.files)
        made = map_jobs(FileMaker, maker, enumerate(files), engine=engine, workers=workers)
    else:
        made = ([name] for name in map_jobs(BlockMaker, maker, _blocks(source_input), engine=engine, workers=workers))
    # disable=None: no bar unless stderr is a terminal.
    with tqdm(
        desc=f"{source_input.spec.name}: tokens", unit=" docs", mininterval=0.5, leave=False, disable=None
    ) as bar:
        for name in chain.from_iterable(made):
            index = read_index(maker.folder, name)
            bar.update(len(index.lengths_D))
            yield name, index.first_bad_row


def _blocks(source_input: _Input) -> Iterator[Block]:
    """Yield all blocks of a source.

    `max_documents` limits the rows of the parts that the split hash divides.
    """
    left = source_input.spec.max_documents
    # Files of the Hub are numbered from 1: block names with 0 are of earlier versions, which read one stream.
    first = 1 if source_input.read is None and not source_input.parts[0].files else 0
    for number, (part, items) in enumerate(_items_by_file(source_input), start=first):
        limit = left if part.split is None else None
        rows = items if limit is None else islice(items, limit)
        for block in cut_blocks(rows, file_number=number, split=part.split):
            left = None if left is None or part.split is not None else left - len(block.items)
            yield block


def _items_by_file(source_input: _Input) -> Iterator[tuple[Part, Iterator[Item]]]:
    for number, part in enumerate(source_input.parts):
        files: Iterator[Iterator[Item]]
        files = (
            iter([source_input.read(part.spec)])
            if source_input.read is not None
            else source_input.rows[number].by_file()
        )
        yield from ((part, items) for items in files)


class FileMaker:
    """Worker that makes all blocks of one file: the unit of work on a cluster."""

    def __init__(self, settings: BlockSettings) -> None:
        self.maker = BlockMaker(settings)

    def __call__(self, job: tuple[int, SourceFile]) -> list[str]:
        """Make the file's blocks; return their names."""
        number, file = job
        rows: Iterator[RawRow | Refused] = read_raw(file, spec=self.maker.settings.spec)
        return [self.maker(block) for block in cut_blocks(rows, file_number=number, split=file.split)]
