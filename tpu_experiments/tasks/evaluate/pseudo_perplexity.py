"""Pseudo-perplexity of documents: every token predicted once, masked alone (Salazar et al., arXiv 1910.14659).

exp(-PLL / N), where PLL sums log p(token | all the others of its document) over the N tokens of the documents. It is no
perplexity: the probabilities are no factors of that of a text, and it compares masked language models of one
tokenizer. A document of L tokens is read L times, in copies that differ in the masked token; the copies of a document
are packed, none seeing another. Legend: N rows of T tokens, K copies of a row at most.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.data.batches import Batch, one_batch
from tpu_experiments.data.held_out import HeldOut
from tpu_experiments.data.rows import Rows, padding
from tpu_experiments.data.tokens.tokenize import LEARN
from tpu_experiments.metrics.bootstrap import Sums
from tpu_experiments.objectives.vocabulary import Vocabulary
from tpu_experiments.training.evaluation import Scorer

MOST_COPIES = 16
"""Copies of a short document in a row: so many places have logits."""


def masked_tokens(ids_L: NDArray[np.int32], flags_L: NDArray[np.uint8], *, vocabulary: Vocabulary) -> NDArray[np.int64]:
    """Return the places of a document's tokens that are masked in turn: those learnt that are not special."""
    return np.flatnonzero(((flags_L & LEARN) > 0) & ~vocabulary.is_special(ids_L))


def rows_of_copies(ids_L: NDArray[np.int32], places_P: NDArray[np.int64], *, seq_len: int) -> Iterator[Rows]:
    """Yield rows, one at a time, of copies of a document; each has `learn` at the next of its places."""
    length = max(1, len(ids_L))
    copies = min(seq_len // length, MOST_COPIES)
    for start in range(0, len(places_P), copies):
        row = padding(1, seq_len=seq_len)
        for number, place in enumerate(places_P[start : start + copies].tolist()):
            span = slice(number * length, (number + 1) * length)
            row.ids_NT[0, span], row.positions_NT[0, span] = ids_L, np.arange(length)
            row.segments_NT[0, span] = number + 1
            row.learn_NT[0, span.start + place] = True
        yield row


def pseudo_sums(
    held_out: HeldOut, *, num_documents: int, scorer: Scorer, shape: tuple[int, int], vocabulary: Vocabulary
) -> Sums:
    """Return masked tokens and their loss in nats of the first documents, (D, 2); every process takes part.

    Of a document longer than a row its beginning is read.

    Args:
        scorer: of `Objective.masked_scores`.
        shape: (rows at once over all devices, tokens per row).
    """
    rows_at_once, seq_len = shape
    documents = [
        (ids_L[:seq_len], masked_tokens(ids_L[:seq_len], flags_L[:seq_len], vocabulary=vocabulary))
        for ids_L, flags_L in list(held_out.documents())[:num_documents]
    ]
    counts_D = np.array([len(places_P) for _, places_P in documents])
    if not counts_D.any():
        return np.zeros((len(documents), 2))
    batches = _batches(documents, seq_len=seq_len, rows_at_once=rows_at_once, name=held_out.name)
    losses_NK, _, weights_NK = scorer.run(batches)
    losses_P = losses_NK[weights_NK > 0].astype(np.float64)
    assert len(losses_P) == counts_D.sum(), "every masked token has a loss"
    document_P = np.repeat(np.arange(len(documents)), counts_D)
    return np.stack([counts_D, np.bincount(document_P, weights=losses_P, minlength=len(documents))], axis=1)


def _batches(
    documents: list[tuple[NDArray[np.int32], NDArray[np.int64]]], *, seq_len: int, rows_at_once: int, name: str
) -> Iterator[Batch]:
    waiting: list[Rows] = []
    rows = (row for ids_L, places_P in documents for row in rows_of_copies(ids_L, places_P, seq_len=seq_len))
    for row in rows:
        waiting.append(row)
        if len(waiting) == rows_at_once:
            yield one_batch(Rows.concatenate(waiting), labels=[name] * rows_at_once, global_rows=rows_at_once)
            waiting = []
    if waiting:
        yield one_batch(Rows.concatenate(waiting), labels=[name] * len(waiting), global_rows=rows_at_once)
