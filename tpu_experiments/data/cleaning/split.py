"""Which documents are trained on, evaluated on and tested on: by a hash of what is in them, so none ever moves."""

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.data.cleaning.duplicates import is_among, mixed

SPLITS = ("train", "evaluation", "test")
"""A split's code is its place here."""


def split_codes(numbers_D: NDArray[np.uint64], *, eval_fraction: float, test_fraction: float) -> NDArray[np.int8]:
    """Splits (D,) of documents by 64 bits of a hash of each, taken as a number between 0 and 1.

    Evaluation lies in [0, eval), test in [eval, eval + test): a change of `test_fraction` moves nothing into or out
    of evaluation, and new documents move none of the old ones.
    """
    codes_D = np.zeros(len(numbers_D), np.int8)
    codes_D[numbers_D < _bound(eval_fraction + test_fraction)] = SPLITS.index("test")
    codes_D[numbers_D < _bound(eval_fraction)] = SPLITS.index("evaluation")
    return codes_D


def joined_groups(groups_D: NDArray[np.uint64], *, first_D: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Groups (D,) of documents, of which those that `first_D` connects are one: a hash of the least of their hashes.

    Not the least itself, since a group of many would nearly always lie in evaluation.

    Args:
        groups_D: hash of each document's group.
        first_D: the document that each is connected with, or -1.
    """
    hashes_G, group_D = np.unique(groups_D, return_inverse=True)
    parent_G = np.arange(len(hashes_G))

    def root(group: int) -> int:
        while parent_G[group] != group:
            parent_G[group] = parent_G[parent_G[group]]
            group = int(parent_G[group])
        return group

    connected = np.flatnonzero(first_D >= 0)
    for one, other in zip(group_D[connected].tolist(), group_D[first_D[connected]].tolist(), strict=True):
        first, second = sorted((root(one), root(other)))
        parent_G[second] = first  # the hashes are sorted, so that a root is the least of its tree
    while (parent_G != (above_G := parent_G[parent_G])).any():
        parent_G = above_G
    is_joined_G = np.bincount(parent_G, minlength=len(parent_G))[parent_G] > 1
    return np.where(is_joined_G, mixed(hashes_G[parent_G]), hashes_G)[group_D]


def split_of(key: bytes, *, eval_fraction: float, test_fraction: float) -> str:
    """Name of the split of one document by a hash of 8 bytes, or the first 8 of a longer one."""
    numbers_1 = np.frombuffer(key[:8], "<u8")
    return SPLITS[split_codes(numbers_1, eval_fraction=eval_fraction, test_fraction=test_fraction)[0]]


def overlaps(keys_D2: NDArray[np.uint64], prompts_D: NDArray[np.uint64], codes_D: NDArray[np.int8]) -> dict[str, int]:
    """Documents of each held-out split whose content, or whose prompt, is in train too.

    Args:
        keys_D2: `content_key` of each of D documents.
        prompts_D: `prompt_key` of each.
        codes_D: split of each; other numbers than those of `SPLITS` are in none.

    Returns:
        `<split>_content_in_train`, which the hash makes 0, and `<split>_prompt_in_train` of both held-out splits.
    """
    train_D = codes_D == SPLITS.index("train")
    counts = {}
    for split in SPLITS[1:]:
        held_out_D = codes_D == SPLITS.index(split)
        # The whole key is only compared where its first half is found.
        here_D, there_D = _shared(keys_D2[:, 0], held_out_D, train_D)
        in_train = set(map(tuple, keys_D2[there_D].tolist()))
        counts[f"{split}_content_in_train"] = sum(tuple(key) in in_train for key in keys_D2[here_D].tolist())
        counts[f"{split}_prompt_in_train"] = int(np.count_nonzero(_shared(prompts_D, held_out_D, train_D)[0]))
    return counts


def _shared(
    values_D: NDArray[np.uint64], some_D: NDArray[np.bool_], others_D: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Masks (D,) of `some` whose value one of `others` has too, and of these others."""
    others_too_D = others_D & is_among(values_D, np.unique(values_D[some_D]))
    return some_D & is_among(values_D, np.unique(values_D[others_too_D])), others_too_D


def _bound(fraction: float) -> np.uint64:
    """The fraction of all 64-bit numbers."""
    return np.uint64(min(int(fraction * 2**64), 2**64 - 1))
