"""Selection of documents: duplicates and splits, over all blocks of a source at once."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.config.data_schema import FIRST_TURN, DataSourceConfig, hashed_shares
from tpu_experiments.data.cleaning.duplicates import find_duplicates, is_among
from tpu_experiments.data.cleaning.split import SPLITS, joined_groups, overlaps, split_codes
from tpu_experiments.data.steps.blocks import BlockIndex, Keys, joined, read_keys, read_whole
from tpu_experiments.data.steps.tokenized import TokenizedSource
from tpu_experiments.storage import paths

DROPPED = -1
BY_HASH = -1


@dataclass(frozen=True, eq=False)
class Selection:
    """The split, or the earlier copy, of each of a source's D documents."""

    code_D: NDArray[np.int8]
    """Index into `SPLITS`, or `DROPPED`."""
    first_D: NDArray[np.int64]
    """The earlier document that this one duplicates, or -1."""
    is_near_D: NDArray[np.bool_]
    """Whether it is a near duplicate, not an exact one."""
    is_own_D: NDArray[np.bool_]
    """Whether it is from the user's own evaluation or test files."""
    groups_D: NDArray[np.uint64]
    """Hash that decides the split: equal for documents that `split_by` keeps in one split."""
    overlaps: dict[str, int]

    def chosen(self, split: str) -> NDArray[np.bool_]:
        """Return the mask (D,) of the split's documents."""
        return self.code_D == SPLITS.index(split)


def select(blocks: Sequence[BlockIndex], *, source: DataSourceConfig, tokens: TokenizedSource) -> Selection:
    """Find duplicates and assign splits; about 45 bytes of memory a document, 60 with near duplicates."""
    keys = joined([read_keys(tokens.folder, block.name) for block in blocks])
    codes = [SPLITS.index(block.split) if block.split else BY_HASH for block in blocks]
    own_D = np.repeat(np.array(codes, np.int8), [len(block.lengths_D) for block in blocks])
    first_D, is_near_D = _copies(keys, blocks=blocks, own_D=own_D, source=source, folder=tokens.folder)
    groups_D = _groups(keys, source=source)
    eval_fraction, test_fraction = hashed_shares(source, own=tokens.own)
    together_D = groups_D
    if source.duplicates.near_copies == "keep":
        stays_D = is_near_D & (own_D[first_D] == BY_HASH)
        together_D = joined_groups(groups_D, first_D=np.where(stays_D, first_D, -1))
        first_D[stays_D] = -1
    code_D = split_codes(together_D, eval_fraction=eval_fraction, test_fraction=test_fraction)
    code_D = np.where(own_D == BY_HASH, code_D, own_D)
    code_D[first_D >= 0] = DROPPED
    found = overlaps(keys.content_D2, keys.prompts_D, code_D)
    return Selection(code_D, first_D, is_near_D, own_D != BY_HASH, groups_D, found)


def _copies(
    keys: Keys,
    *,
    blocks: Sequence[BlockIndex],
    own_D: NDArray[np.int8],
    source: DataSourceConfig,
    folder: str,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the document that each of D documents duplicates, or -1, and whether only nearly.

    All documents of the user's own evaluation and test files are kept. Where documents of `path` that duplicate one of
    them are to be dropped, those files come first in the search, and are compared by `content_key`, as in the audit's
    overlaps.
    """
    rules, is_own_D = source.duplicates, own_D != BY_HASH
    first_D, is_near_D = np.full(len(own_D), -1, np.int64), np.zeros(len(own_D), np.bool_)
    drops_held_out = source.held_out_copies == "drop" and bool(is_own_D.any())
    if rules.exact == "keep" and rules.near is None and not drops_held_out:
        return first_D, is_near_D
    own = [block for block in blocks if block.split] if drops_held_out else []
    looked_at = [*own, *(block for block in blocks if not block.split)]
    index_M = np.concatenate([np.flatnonzero(is_own_D) if own else [], np.flatnonzero(~is_own_D)]).astype(np.int64)
    with tempfile.TemporaryDirectory(prefix="tpu_experiments_") as scratch:
        signatures = None if rules.near is None else _Signatures(folder, looked_at, scratch=scratch)
        compared_D2 = _compared(keys, is_own_D=is_own_D if own else None)
        first_M, is_near_M = find_duplicates(compared_D2[index_M], signatures=signatures, near=rules.near)
    first_D[index_M] = np.where(first_M >= 0, index_M[first_M], -1)
    is_near_D[index_M] = is_near_M
    if rules.exact == "keep":
        of_held_out_D = (first_D >= 0) & is_own_D[first_D]
        first_D[~is_near_D & ~of_held_out_D] = -1
    first_D[is_own_D] = -1
    return first_D, is_near_D & ~is_own_D


def _compared(keys: Keys, *, is_own_D: NDArray[np.bool_] | None) -> NDArray[np.uint64]:
    """Return comparison keys (D, 2): `content_key` of `is_own_D` and of their copies, else `exact_key`."""
    if keys.exact_D2 is None:
        return keys.content_D2
    if is_own_D is None:
        return keys.exact_D2
    own = np.flatnonzero(is_own_D)
    candidates = np.flatnonzero(is_among(keys.content_D2[:, 0], np.unique(keys.content_D2[own, 0])))
    held_out = set(map(tuple, keys.content_D2[own].tolist()))
    is_one = np.array([tuple(key) in held_out for key in keys.content_D2[candidates].tolist()], np.bool_)
    compared_D2 = keys.exact_D2.copy()
    compared_D2[candidates[is_one]] = keys.content_D2[candidates[is_one]]
    return compared_D2


def _groups(keys: Keys, *, source: DataSourceConfig) -> NDArray[np.uint64]:
    """Return the hash (D,) that decides each document's split, the same in every source."""
    if keys.groups_D is not None:
        return keys.groups_D
    is_by_turn = source.split_by == FIRST_TURN and source.kind != "text"
    return keys.prompts_D if is_by_turn else keys.content_D2[:, 0]


class _Signatures(Sequence[NDArray[np.uint32]]):
    """The blocks' (D, P) signatures, each memory-mapped on access; remote ones are copied to `scratch`.

    All are read once at construction, to verify their SHA-256 against the indexes.
    """

    def __init__(self, folder: str, blocks: Sequence[BlockIndex], *, scratch: str) -> None:
        self.files = [paths.join(folder, "blocks", f"{block.name}.minhash.npy") for block in blocks]
        self.lengths = [len(block.lengths_D) for block in blocks]
        copies = [paths.join(scratch, f"{block.name}.npy") for block in blocks]
        for block, file, copy in zip(blocks, self.files, copies, strict=True):
            content = read_whole(file, sha256=block.sha256["minhash"])
            if paths.is_remote(folder):
                paths.write_bytes_atomic(copy, content)
        if paths.is_remote(folder):
            self.files = copies

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        # numpy cannot memory-map an empty array.
        return np.load(self.files[index], mmap_mode="r" if self.lengths[index] else None)
