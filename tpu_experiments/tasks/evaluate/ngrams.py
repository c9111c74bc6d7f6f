"""Guesses of masked tokens from counts of the training rows, which a masked language model has to exceed.

The unigram guess is the most frequent token, the bigram guess the most frequent one behind the token to the left. That
token is taken as it is in the text, even where the model reads it masked. Only tokens that can be masked are guessed.
Legend: N rows of T tokens, V vocabulary, L tokens of held-out documents.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.data.held_out import HeldOut
from tpu_experiments.data.rows import Rows, RowSource
from tpu_experiments.objectives.vocabulary import Vocabulary

log = logging.getLogger(__name__)
MOST_TOKENS = 2**25
"""Training tokens that are counted; of more, in rows at equal distances. Their pairs are 256 MiB."""
ROWS = 2**10
"""Rows read at once."""


@dataclass(frozen=True, eq=False)
class Ngrams:
    """Guesses from the counts of training tokens."""

    num_tokens: int
    """Tokens that were counted."""
    commonest: int
    """The most frequent token, of equally frequent ones the first of the vocabulary."""
    after_V: NDArray[np.int32]
    """The most frequent token behind each; `commonest` behind those that no counted token follows."""

    def guesses(self, held_out: HeldOut) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the unigram and the bigram guess of every token of the documents, (L,) each.

        The first token of a document has no other to its left; its two guesses are the same.
        """
        ids_L = held_out.flat.ids_L
        unigram_L = np.full(len(ids_L), self.commonest, np.int32)
        bigram_L = unigram_L.copy()
        known_L = ids_L[:-1] < len(self.after_V)
        bigram_L[1:][known_L] = self.after_V[ids_L[:-1][known_L]]
        lengths_D = held_out.flat.lengths_D
        bigram_L[(np.cumsum(lengths_D) - lengths_D)[lengths_D > 0]] = self.commonest
        return unigram_L, bigram_L


def counted(stores: Iterable[RowSource], *, vocabulary: Vocabulary) -> Ngrams | None:
    """Count the tokens of training rows and their pairs; None without a token to guess."""
    stores = list(stores)
    total = sum(store.num_rows * store.seq_len for store in stores)
    stride = max(1, -(-total // MOST_TOKENS))
    if stride > 1:
        log.info("unigrams and bigrams are counted in every %d. row of the training split", stride)
    counts_V = np.zeros(0, np.int64)
    pairs: list[NDArray[np.int64]] = []
    for store in stores:
        chosen = np.arange(0, store.num_rows, stride)
        for start in range(0, len(chosen), ROWS):
            rows = store.take(chosen[start : start + ROWS])
            tokens, left_right = _learnt(rows, vocabulary)
            found_V = np.bincount(tokens, minlength=len(counts_V))
            found_V[: len(counts_V)] += counts_V
            counts_V = found_V
            pairs.append(left_right)
    if not counts_V.any():
        return None
    return Ngrams(int(counts_V.sum()), int(counts_V.argmax()), _commonest_after(pairs, int(counts_V.argmax())))


def _learnt(rows: Rows, vocabulary: Vocabulary) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the tokens that can be masked, and left * 2**32 + token of those with a token to the left."""
    may_NT = rows.learn_NT & (rows.segments_NT > 0) & ~vocabulary.is_special(rows.ids_NT)
    follows_NT = may_NT[:, 1:] & (rows.segments_NT[:, 1:] == rows.segments_NT[:, :-1])
    left, right = rows.ids_NT[:, :-1][follows_NT], rows.ids_NT[:, 1:][follows_NT]
    return rows.ids_NT[may_NT], left.astype(np.int64) << 32 | right


def _commonest_after(pairs: list[NDArray[np.int64]], commonest: int) -> NDArray[np.int32]:
    keys, counts = np.unique(np.concatenate(pairs), return_counts=True)
    left, right = keys >> 32, keys & 0xFFFFFFFF
    order = np.lexsort((right, -counts, left))
    first = order[np.unique(left[order], return_index=True)[1]]
    after_V = np.full(int(left.max(initial=-1)) + 1, commonest, np.int32)
    after_V[left[first]] = right[first]
    return after_V
