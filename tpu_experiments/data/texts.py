"""Cleaned documents of a config's sources as text, for training a tokenizer and measuring it.

They are those that training would see: the same readers, rules of `clean`, duplicates and splits. Kept in the folder of
prepared data, they are read again for another tokenizer; they are streamed a block (2 MiB of rows) at a time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.config.data_schema import DataSourceConfig, PrepareConfig
from tpu_experiments.data.cleaning.clean import check_rules
from tpu_experiments.data.cleaning.duplicates import mixed
from tpu_experiments.data.cleaning.split import SPLITS
from tpu_experiments.data.documents import spec_of
from tpu_experiments.data.steps.blocks import read_index, read_keys, read_texts
from tpu_experiments.data.steps.selection import select
from tpu_experiments.data.steps.tokenized import Read, tokenize_source
from tpu_experiments.storage import paths


@dataclass(frozen=True, eq=False)
class SourceTexts:
    """Cleaned documents of one source: the split, size and content hash of each of D."""

    name: str
    key: str
    """Hash of everything that decides the documents."""
    folder: str
    code_D: NDArray[np.int8]
    """Index into `SPLITS`, or -1 for a duplicate."""
    bytes_D: NDArray[np.int64]
    """UTF-8 bytes."""
    hash_D: NDArray[np.uint64]
    """Half of `content_key`, which does not depend on the order of the documents."""
    block_lengths: dict[str, int] = field(repr=False)
    """Documents of each block, in order."""

    def texts(self, chosen_D: NDArray[np.bool_]) -> Iterator[str]:
        """Yield the texts of the chosen documents, in the order of the source."""
        first = 0
        for name, length in self.block_lengths.items():
            chosen = np.flatnonzero(chosen_D[first : first + length]).tolist()
            first += length
            if chosen:
                texts = read_texts(paths.join(self.folder, "documents"), name)
                for index in chosen:
                    yield from texts[index]


def cleaned_texts(
    sources: Mapping[str, DataSourceConfig],
    *,
    data_size: str,
    settings: PrepareConfig,
    folder: str,
    readers: Mapping[str, Read],
) -> list[SourceTexts]:
    """Read, clean and split every source, or find what an earlier call has left in `folder`.

    Memory: about 70 bytes for each document.

    Raises:
        ConfigError: a source that cannot be read or is empty, or a bad row with `on_bad_row: stop`.
    """
    paths.require_no_links(folder, key=f"prepare.folder={folder}")
    found = []
    for name, source in sources.items():
        spec = spec_of(name, source, data_size=data_size)
        check_rules(source.clean, source=name, kind=spec.kind)
        tokens = tokenize_source(
            spec,
            source=source,
            tokenizer=None,
            settings=replace(settings, documents="keep"),
            folder=folder,
            read=readers.get(name),
        )
        blocks = [read_index(tokens.folder, block) for block in tokens.block_names]
        selection = select(blocks, source=source, tokens=tokens)
        keys = [read_keys(tokens.folder, block.name).content_D2[:, 0] for block in blocks]
        found.append(
            SourceTexts(
                name=name,
                key=tokens.key,
                folder=tokens.folder,
                code_D=selection.code_D,
                bytes_D=np.concatenate([block.lengths_D for block in blocks]),
                hash_D=np.concatenate(keys),
                block_lengths={block.name: len(block.lengths_D) for block in blocks},
            )
        )
    return found


def drawn(
    sources: list[SourceTexts], *, splits: tuple[str, ...], max_bytes: int | None, seed: int
) -> list[NDArray[np.bool_]]:
    """Draw documents of some splits, at most `max_bytes` of all sources together; return a mask (D,) of each source.

    Documents are taken in the order of a hash of their content and `seed`: a larger limit adds to a smaller one. The
    first is always taken.
    """
    codes = [SPLITS.index(split) for split in splits]
    members = [np.isin(source.code_D, codes) for source in sources]
    total = sum(int(source.bytes_D[member].sum()) for source, member in zip(sources, members, strict=True))
    if max_bytes is None or total <= max_bytes:
        return members
    salt = mixed(np.array([seed + 1], np.uint64))
    order_D = mixed(np.concatenate([source.hash_D for source in sources]) ^ salt)
    member_D = np.flatnonzero(np.concatenate(members))
    sorted_D = member_D[np.argsort(order_D[member_D], kind="stable")]
    sizes_D = np.concatenate([source.bytes_D for source in sources])[sorted_D]
    is_kept = np.cumsum(sizes_D) <= max_bytes
    is_kept[:1] = True
    kept_D = np.zeros(len(order_D), np.bool_)
    kept_D[sorted_D[is_kept]] = True
    return np.split(kept_D, np.cumsum([len(source.code_D) for source in sources])[:-1])
