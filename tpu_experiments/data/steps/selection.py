"""Which documents of a source go on, and to which split: duplicates and the hash, over all blocks at once."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.config.sources import DataSourceConfig
from tpu_experiments.data.cleaning.duplicates import find_duplicates
from tpu_experiments.data.cleaning.split import SPLITS, overlaps, split_codes
from tpu_experiments.data.steps.blocks import BlockIndex, read_keys, read_whole
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
    overlaps: dict[str, int]

    def chosen(self, split: str) -> NDArray[np.bool_]:
        """Mask of the split's documents."""
        return self.code_D == SPLITS.index(split)


def select(blocks: Sequence[BlockIndex], *, source: DataSourceConfig, tokens_folder: str) -> Selection:
    """Duplicates and splits of all documents; about 45 bytes of memory a document, 60 with near duplicates."""
    keys_D2, prompts_D = _keys(blocks, folder=tokens_folder)
    num_documents = len(keys_D2)
    first_D = np.full(num_documents, -1, np.int64)
    is_near_D = np.zeros(num_documents, np.bool_)
    rules = source.duplicates
    if rules.exact == "drop" or rules.near is not None:
        with tempfile.TemporaryDirectory(prefix="tpu_experiments_") as scratch:
            signatures = None if rules.near is None else _Signatures(tokens_folder, blocks, scratch=scratch)
            first_D, is_near_D = find_duplicates(keys_D2, signatures=signatures, near=rules.near)
        if rules.exact == "keep":
            first_D[~is_near_D] = -1
    code_D = split_codes(keys_D2, eval_fraction=source.eval_fraction, test_fraction=source.test_fraction)
    code_D[first_D >= 0] = DROPPED
    return Selection(code_D, first_D, is_near_D, overlaps(keys_D2, prompts_D, code_D))


def _keys(blocks: Sequence[BlockIndex], *, folder: str) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Content keys (D, 2) and prompt keys (D,) of all documents."""
    num_documents = sum(len(block.lengths_D) for block in blocks)
    keys_D2, prompts_D = np.empty((num_documents, 2), np.uint64), np.empty(num_documents, np.uint64)
    first = 0
    for block in blocks:
        part = slice(first, first + len(block.lengths_D))
        keys_D2[part], prompts_D[part] = read_keys(folder, block.name)
        first = part.stop
    return keys_D2, prompts_D


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
