"""Best-fit packing of documents into rows (arXiv 2404.10830).

Documents of any length -> pieces of at most T tokens -> rows of exactly T tokens. No token is lost
or doubled, except those of pieces in which nothing can be learnt, which are counted. The result
depends on the documents and their order alone.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.data.rows import Rows, padding
from tpu_experiments.data.tokenize import Tokens


@dataclass(frozen=True, eq=False)
class FlatTokens:
    """L tokens of D documents end to end: 5 bytes a token, where Python lists take about 40."""

    ids_L: NDArray[np.int32]
    learn_L: NDArray[np.bool_]
    lengths_D: NDArray[np.int64]

    @property
    def num_documents(self) -> int:
        return self.lengths_D.shape[0]


@dataclass(frozen=True, eq=False)
class Packed:
    """Rows, and what packing did to the documents."""

    rows: Rows
    num_split: int
    """Documents longer than a row."""
    num_dropped_pieces: int
    """Pieces in which nothing can be learnt."""
    num_dropped_tokens: int
    """Tokens of those pieces."""


def flatten(tokens: Iterable[Tokens]) -> FlatTokens:
    """Copy documents out of Python lists, one at a time."""
    ids, learn, lengths = array("i"), array("b"), array("q")
    for document in tokens:
        ids.extend(document.ids)
        learn.extend(document.learn)
        lengths.append(len(document.ids))
    return FlatTokens(np.array(ids, np.int32), np.array(learn, np.bool_), np.array(lengths, np.int64))


def pack(tokens: Iterable[Tokens], *, seq_len: int, pad_id: int) -> Rows:
    """Rows of `seq_len` tokens; a document longer than that is split into several segments."""
    return pack_flat(flatten(tokens), seq_len=seq_len, pad_id=pad_id).rows


def pack_flat(flat: FlatTokens, *, seq_len: int, pad_id: int) -> Packed:
    """As `pack`, with the counts."""
    starts_P, lengths_P = _pieces(flat.lengths_D, seq_len=seq_len)
    # A piece's first token has nothing before it in its segment, so it cannot be predicted.
    learn_L = flat.learn_L.copy()
    learn_L[starts_P] = False
    learnt_before = np.concatenate([[0], np.cumsum(learn_L)])
    kept_P = learnt_before[starts_P + lengths_P] > learnt_before[starts_P]
    dropped = lengths_P[~kept_P]
    starts_P, lengths_P = starts_P[kept_P], lengths_P[kept_P]
    row_P, column_P, num_rows = _best_fit(lengths_P, seq_len=seq_len)
    rows = padding(num_rows, seq_len=seq_len, pad_id=pad_id)
    segments = [0] * num_rows
    for piece in np.argsort(-lengths_P, kind="stable").tolist():
        row, column = row_P[piece], column_P[piece]
        start, length = int(starts_P[piece]), int(lengths_P[piece])
        segments[row] += 1
        where = slice(column, column + length)
        rows.ids_NT[row, where] = flat.ids_L[start : start + length]
        rows.learn_NT[row, where] = learn_L[start : start + length]
        rows.positions_NT[row, where] = np.arange(length, dtype=np.int32)
        rows.segments_NT[row, where] = segments[row]
    num_split = int(np.count_nonzero(flat.lengths_D > seq_len))
    return Packed(rows, num_split, len(dropped), int(dropped.sum()))


def _pieces(lengths_D: NDArray[np.int64], *, seq_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Start and length of every piece of at most `seq_len` tokens, in document order."""
    pieces_D = -(-lengths_D // seq_len)
    document_P = np.repeat(np.arange(len(lengths_D)), pieces_D)
    first_D = np.cumsum(pieces_D) - pieces_D
    offset_P = (np.arange(len(document_P)) - first_D[document_P]) * seq_len
    begin_D = np.cumsum(lengths_D) - lengths_D
    return begin_D[document_P] + offset_P, np.minimum(lengths_D[document_P] - offset_P, seq_len)


def _best_fit(lengths_P: NDArray[np.int64], *, seq_len: int) -> tuple[list[int], list[int], int]:
    """(row, column) of every piece and the number of rows: longest first, into the fullest row.

    `open_rows[s]` are the rows with s tokens of space; bit s of `spaces` is set when there is one,
    so the least sufficient space is the lowest bit at or above the length: O(P * T / 64).
    """
    row_P, column_P = [0] * len(lengths_P), [0] * len(lengths_P)
    open_rows: list[list[int]] = [[] for _ in range(seq_len + 1)]
    spaces, num_rows = 0, 0
    for piece in np.argsort(-lengths_P, kind="stable").tolist():
        length = int(lengths_P[piece])
        enough = spaces >> length
        if enough:
            space = length + (enough & -enough).bit_length() - 1
            row = open_rows[space].pop()
            if not open_rows[space]:
                spaces ^= 1 << space
        else:
            space, row = seq_len, num_rows
            num_rows += 1
        row_P[piece], column_P[piece] = row, seq_len - space
        left = space - length
        if left:
            open_rows[left].append(row)
            spaces |= 1 << left
    return row_P, column_P, num_rows
