"""Assignment of documents to train, evaluation and test by a hash of their content.

The hash of a document never changes, so a document never moves to another split.
"""

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.data.cleaning.duplicates import is_among, mixed

SPLITS = ("train", "evaluation", "test")
"""The code of a split is its index here."""


def split_codes(numbers_D: NDArray[np.uint64], *, eval_fraction: float, test_fraction: float) -> NDArray[np.int8]:
    """Return the split codes (D,) of documents, from 64 bits of a hash each.

    The hash is read as a number between 0 and 1. Evaluation is [0, eval), test is [eval, eval + test): a change of
    `test_fraction` moves no document into or out of evaluation, and new documents do not move old ones.
    """
    codes_D = np.zeros(len(numbers_D), np.int8)
    codes_D[numbers_D < _bound(eval_fraction + test_fraction)] = SPLITS.index("test")
    codes_D[numbers_D < _bound(eval_fraction)] = SPLITS.index("evaluation")
    return codes_D


def joined_groups(groups_D: NDArray[np.uint64], *, first_D: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Merge the groups that `first_D` connects; return the group hash (D,) of each document.

    The hash of a merged group is a hash of the smallest of its hashes. The smallest itself would put nearly every
    merged group into evaluation, the low end of the range.

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
        parent_G[second] = first  # the hashes are sorted, so a root is the smallest of its tree
    while (parent_G != (above_G := parent_G[parent_G])).any():
        parent_G = above_G
    is_joined_G = np.bincount(parent_G, minlength=len(parent_G))[parent_G] > 1
    return np.where(is_joined_G, mixed(hashes_G[parent_G]), hashes_G)[group_D]


def overlaps(keys_D2: NDArray[np.uint64], prompts_D: NDArray[np.uint64], codes_D: NDArray[np.int8]) -> dict[str, int]:
    """Count the documents of each held-out split whose content, or whose prompt, is in train too.

    Args:
        keys_D2: `content_key` of each of D documents.
        prompts_D: `prompt_key` of each.
        codes_D: split of each; codes outside of `SPLITS` are in none.

    Returns:
        For both held-out splits, `<split>_content_in_train`, which is 0 where the split hash decides, and
        `<split>_prompt_in_train`.
    """
    train_D = codes_D == SPLITS.index("train")
    counts = {}
    for split in SPLITS[1:]:
        held_out_D = codes_D == SPLITS.index(split)
        # The whole key is compared only where its first half matches.
        here_D, there_D = _shared(keys_D2[:, 0], held_out_D, train_D)
        in_train = set(map(tuple, keys_D2[there_D].tolist()))
        counts[f"{split}_content_in_train"] = sum(tuple(key) in in_train for key in keys_D2[here_D].tolist())
        counts[f"{split}_prompt_in_train"] = int(np.count_nonzero(_shared(prompts_D, held_out_D, train_D)[0]))
    return counts


def _shared(
    values_D: NDArray[np.uint64], some_D: NDArray[np.bool_], others_D: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return masks (D,) of `some` whose value occurs among `others`, and of these others."""
    others_too_D = others_D & is_among(values_D, np.unique(values_D[some_D]))
    return some_D & is_among(values_D, np.unique(values_D[others_too_D])), others_too_D


def _bound(fraction: float) -> np.uint64:
    """Return the upper bound of the fraction of all 64-bit numbers."""
    return np.uint64(min(int(fraction * 2**64), 2**64 - 1))
