"""Which documents of a source go on, and to which split: duplicates and the hash, over all blocks at once."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.config.sources import FIRST_TURN, DataSourceConfig
from tpu_experiments.data.cleaning.duplicates import find_duplicates
from tpu_experiments.data.cleaning.split import SPLITS, overlaps, split_codes
from tpu_experiments.data.steps.blocks import BlockIndex, Keys, joined, read_keys, read_whole
from tpu_experiments.io import paths

DROPPED = -1


@dataclass(frozen=True, eq=False)
class Selection:
    """What happens to each of a source's D documents."""

    code_D: NDArray[np.int8]
    """Index into `SPLITS`, or `DROPPED`."""
    first_D: NDArray[np.int64]
    """The earlier document that this one repeats, or -1."""
    is_near_D: NDArray[np.bool_]
    """Whether it repeats it nearly, not exactly."""
    groups_D: NDArray[np.uint64]
    """Equal where `split_by` puts documents into one split."""
    overlaps: dict[str, int]

    def chosen(self, split: str) -> NDArray[np.bool_]:
        """Mask of the split's documents."""
        return self.code_D == SPLITS.index(split)


def select(blocks: Sequence[BlockIndex], *, source: DataSourceConfig, tokens_folder: str) -> Selection:
    """Duplicates and splits of all documents; about 45 bytes of memory a document, 60 with near duplicates."""
    keys = joined([read_keys(tokens_folder, block.name) for block in blocks])
    keys_D2, num_documents = keys.content_D2, len(keys.content_D2)
    first_D = np.full(num_documents, -1, np.int64)
    is_near_D = np.zeros(num_documents, np.bool_)
    rules = source.duplicates
    if rules.exact != "keep" or rules.near is not None:
        with tempfile.TemporaryDirectory(prefix="tpu_experiments_") as scratch:
            signatures = None if rules.near is None else _Signatures(tokens_folder, blocks, scratch=scratch)
            compared_D2 = keys_D2 if keys.exact_D2 is None else keys.exact_D2
            first_D, is_near_D = find_duplicates(compared_D2, signatures=signatures, near=rules.near)
        if rules.exact == "keep":
            first_D[~is_near_D] = -1
    groups_D = _groups(keys, source=source)
    code_D = split_codes(groups_D, eval_fraction=source.eval_fraction, test_fraction=source.test_fraction)
    code_D[first_D >= 0] = DROPPED
    return Selection(code_D, first_D, is_near_D, groups_D, overlaps(keys_D2, keys.prompts_D, code_D))


def _groups(keys: Keys, *, source: DataSourceConfig) -> NDArray[np.uint64]:
    """A hash (D,) of what decides each document's split, the same in every source."""
    if keys.groups_D is not None:
        return keys.groups_D
    is_by_turn = source.split_by == FIRST_TURN and source.kind == "chat"
    return keys.prompts_D if is_by_turn else keys.content_D2[:, 0]


class _Signatures(Sequence[NDArray[np.uint32]]):
    """The blocks' (D, P) signatures, each memory-mapped when it is asked for; remote ones are copied to `scratch`.

    All are read once at the start, and compared with the digests of their indexes.
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
        # numpy cannot map an array without a byte.
        return np.load(self.files[index], mmap_mode="r" if self.lengths[index] else None)
