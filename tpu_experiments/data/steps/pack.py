"""Packing of documents into rows of T tokens: best-fit (arXiv 2404.10830), or one document a row.

Documents of any length are cut into pieces of at most T tokens, and pieces are placed into rows. With
`long_documents=split` no token is lost or doubled, except those of pieces without a trainable token, which are counted.
The result depends on the documents and their order alone.

Best-fit packing leaves gaps where most pieces are a little longer than half a row. `fill_gaps` closes them: a document
longer than a row is in pieces anyway, so a row that holds only such pieces can be dissolved. Its tokens move, in order,
into gaps of at least a sixteenth of a row, and the row is dropped. The emptiest rows are dissolved first, as long as
the others have room.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.data.rows import Rows, padding
from tpu_experiments.data.tokens.lengths import split_points, truncate
from tpu_experiments.data.tokens.tokenize import CUT, LEARN, SECOND, Tokens

Index = NDArray[np.int64]
SMALLEST_SHARE = 16  # smallest piece is 1/16 of a row; a shorter one has too little context to learn from


@dataclass(frozen=True, eq=False)
class Placed:
    """P pieces in N rows: the token range, document, row and column of each."""

    start_P: Index
    length_P: Index
    document_P: Index
    row_P: Index
    column_P: Index
    num_rows: int


Chunk = tuple[int, int, int, int, int]
"""Start, length, document, row and column of a piece."""


def fill_gaps(placed: Placed, *, is_split_D: NDArray[np.bool_], seq_len: int) -> Placed:
    """Dissolve rows into the gaps of others; only pieces of the documents in `is_split_D` are cut."""
    used_N = np.bincount(placed.row_P, weights=placed.length_P, minlength=placed.num_rows).astype(np.int64)
    is_whole_P = ~is_split_D[placed.document_P]
    is_fixed_N = np.bincount(placed.row_P, weights=is_whole_P, minlength=placed.num_rows) > 0
    taken, chunks = _RowDissolver(placed, used_N=used_N, is_fixed_N=is_fixed_N, seq_len=seq_len).run()
    is_taken_N = np.zeros(placed.num_rows, np.bool_)
    is_taken_N[taken] = True
    kept_P = ~is_taken_N[placed.row_P]
    new_of_row_N = np.cumsum(~is_taken_N) - 1
    chunks_C5 = np.array(chunks, np.int64).reshape(-1, 5)
    return Placed(
        start_P=np.concatenate([placed.start_P[kept_P], chunks_C5[:, 0]]),
        length_P=np.concatenate([placed.length_P[kept_P], chunks_C5[:, 1]]),
        document_P=np.concatenate([placed.document_P[kept_P], chunks_C5[:, 2]]),
        row_P=new_of_row_N[np.concatenate([placed.row_P[kept_P], chunks_C5[:, 3]])],
        column_P=np.concatenate([placed.column_P[kept_P], chunks_C5[:, 4]]),
        num_rows=placed.num_rows - len(taken),
    )


class _RowDissolver:
    """Greedy dissolution of rows, one after the other, until the gaps of the remaining rows are full."""

    def __init__(self, placed: Placed, *, used_N: Index, is_fixed_N: NDArray[np.bool_], seq_len: int) -> None:
        self.placed, self.used_N, self.seq_len = placed, used_N, seq_len
        self.smallest = max(1, seq_len // SMALLEST_SHARE)
        by_use = np.argsort(used_N, kind="stable")
        self.donors = by_use[~is_fixed_N[by_use]]
        # Gaps of rows that cannot be dissolved come first, the widest first; then those of the fullest donor rows.
        gaps = np.concatenate([by_use[is_fixed_N[by_use]], self.donors[::-1]])
        self.gaps = gaps[seq_len - used_N[gaps] >= self.smallest].tolist()
        self.pieces = np.argsort(placed.row_P, kind="stable")
        self.firsts = np.searchsorted(placed.row_P[self.pieces], np.arange(placed.num_rows + 1))

    def run(self) -> tuple[list[int], list[Chunk]]:
        """Return the dissolved rows, and the chunks that their pieces became."""
        taken: list[int] = []
        chunks: list[Chunk] = []
        next_gap = 0
        for row in self.donors.tolist():
            poured = self._dissolve(row, next_gap)
            if poured is None:
                break
            taken.append(row)
            chunks += poured[0]
            next_gap = poured[1]
            for _, length, _, target, _ in poured[0]:
                self.used_N[target] += length
            if row in self.gaps[next_gap:]:
                self.gaps.remove(row)
        return taken, chunks

    def _dissolve(self, row: int, next_gap: int) -> tuple[list[Chunk], int] | None:
        """Return a row's chunks and the next open gap; None without room outside rows filled before.

        A chunk shorter than `smallest` only results from a piece of less than two of them.
        """
        chunks: list[Chunk] = []
        fresh = 0
        for piece in self.pieces[self.firsts[row] : self.firsts[row + 1]].tolist():
            start, left = int(self.placed.start_P[piece]), int(self.placed.length_P[piece])
            while left:
                if next_gap == len(self.gaps) or self.gaps[next_gap] == row:
                    return None
                target = self.gaps[next_gap]
                column = int(self.used_N[target]) + fresh
                gap = self.seq_len - column
                length = min(gap, left)
                if 0 < left - length < self.smallest and left >= 2 * self.smallest:
                    length = left - self.smallest
                chunks.append((start, length, int(self.placed.document_P[piece]), target, column))
                start, left, fresh = start + length, left - length, fresh + length
                if gap - length < self.smallest:
                    next_gap, fresh = next_gap + 1, 0
        return chunks, next_gap


@dataclass(frozen=True, eq=False)
class FlatTokens:
    """L tokens of D documents, concatenated: 5 bytes a token."""

    ids_L: NDArray[np.int32]
    flags_L: NDArray[np.uint8]
    lengths_D: Index
    more: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Further arrays of tokens (L,) by name, as in `Rows`."""

    @property
    def num_documents(self) -> int:
        return self.lengths_D.shape[0]

    def document(self, index: int, *, start: int) -> Tokens:
        """Return document `index`, whose first token is at `start`."""
        part = slice(start, start + int(self.lengths_D[index]))
        return Tokens(self.ids_L[part], self.flags_L[part], str(index))


@dataclass(frozen=True, eq=False)
class Packed:
    """Packed rows, the documents in them, and counts of what was cut or dropped."""

    rows: Rows
    kept_D: NDArray[np.bool_]
    """Documents that are in the rows, at least in part."""
    learnt_L: NDArray[np.bool_]
    """Tokens of the documents that are trained on in a row."""
    counts: Counter[str] = field(default_factory=Counter)
    """`documents_split`, `documents_truncated`, `documents_truncated_in_turn`; `tokens_dropped` by truncation and with
    pieces without a trainable token; `too_long` and `nothing_to_learn`, the documents that are not kept;
    `supervised_without_prompt`, trainable tokens in answers whose question does not begin in the row."""


@dataclass(frozen=True, eq=False)
class _Pieces:
    """P token ranges, in document order."""

    start_P: Index
    length_P: Index
    document_P: Index

    def take(self, index: NDArray[np.bool_] | Index) -> "_Pieces":
        return _Pieces(self.start_P[index], self.length_P[index], self.document_P[index])


def flatten(tokens: Iterable[Tokens]) -> FlatTokens:
    """Concatenate documents into flat arrays."""
    listed = list(tokens)
    empty = [np.zeros(0, np.int32)], [np.zeros(0, np.uint8)]
    return FlatTokens(
        np.concatenate([t.ids for t in listed] or empty[0]),
        np.concatenate([t.flags for t in listed] or empty[1]),
        np.array([len(t.ids) for t in listed], np.int64),
    )


def pack(
    flat: FlatTokens, *, seq_len: int, pad_id: int, packing: str = "best_fit", long_documents: str = "split"
) -> Packed:
    """Pack documents into rows of `seq_len` tokens.

    `packing` and `long_documents` take the values of `prepare.packing` and `prepare.long_documents`.
    """
    counts: Counter[str] = Counter()
    pieces = _pieces(flat, seq_len=seq_len, long_documents=long_documents, counts=counts)
    # A piece's first token has no context in its segment, so it is not predicted.
    learn_L = (flat.flags_L & LEARN).astype(np.bool_)
    learn_L[pieces.start_P[pieces.length_P > 0]] = False
    learnt_before = np.concatenate([np.zeros(1, np.int32), np.cumsum(learn_L, dtype=np.int32)])
    learnt_P = learnt_before[pieces.start_P + pieces.length_P] > learnt_before[pieces.start_P]
    counts["tokens_dropped"] += int(pieces.length_P[~learnt_P].sum())
    in_pieces_D = np.zeros(flat.num_documents, np.bool_)
    in_pieces_D[pieces.document_P] = True
    kept_D = np.zeros(flat.num_documents, np.bool_)
    kept_D[pieces.document_P[learnt_P]] = True
    counts["nothing_to_learn"] += int(np.count_nonzero(in_pieces_D & ~kept_D))
    placed = _place(pieces.take(learnt_P), seq_len=seq_len, packing=packing)
    if packing == "best_fit" and long_documents == "split":
        placed = fill_gaps(placed, is_split_D=flat.lengths_D > seq_len, seq_len=seq_len)
        learn_L[placed.start_P] = False
    counts["supervised_without_prompt"] = _without_prompt(flat, learn_L, placed=placed)
    placed = _halved(placed, second=np.flatnonzero(flat.flags_L & SECOND))
    learn_L[placed.start_P] = False
    rows = padding(placed.num_rows, seq_len=seq_len, pad_id=pad_id, like=flat.more)
    _fill(rows, {"ids": flat.ids_L, "learn": learn_L, **flat.more}, placed=placed)
    return Packed(rows, kept_D, learn_L & _placed(placed, num_tokens=len(learn_L)), counts)


def _halved(placed: Placed, *, second: Index) -> Placed:
    """Return the pieces with each pair in two, so that its conversations are two segments beside each other.

    A row of pairs then has the segments 1, 2, 3, 4, ...: an odd one is chosen, the even one behind it the rejected
    one of the same pair. A pair is a piece of its own, never split.

    Args:
        second: tokens with `SECOND`, in order, none of them the first of a piece.
    """
    if not len(second) or not len(placed.start_P):
        return placed
    order = np.argsort(placed.start_P)
    at = order[np.searchsorted(placed.start_P[order], second, side="right") - 1]
    # Pairs that no row holds have no piece; one before the first piece is found at the last.
    is_inside = (placed.start_P[at] <= second) & (second < (placed.start_P + placed.length_P)[at])
    at, second = at[is_inside], second[is_inside]
    first_length = second - placed.start_P[at]
    length_P = placed.length_P.copy()
    length_P[at] = first_length
    return Placed(
        start_P=np.concatenate([placed.start_P, second]),
        length_P=np.concatenate([length_P, placed.length_P[at] - first_length]),
        document_P=np.concatenate([placed.document_P, placed.document_P[at]]),
        row_P=np.concatenate([placed.row_P, placed.row_P[at]]),
        column_P=np.concatenate([placed.column_P, placed.column_P[at] + first_length]),
        num_rows=placed.num_rows,
    )


def _placed(placed: Placed, *, num_tokens: int) -> NDArray[np.bool_]:
    """Return the mask (L,) of the tokens that are in a row."""
    borders = np.zeros(num_tokens + 1, np.int8)  # of pieces that do not overlap: 1 at a begin, -1 at an end, 0 at both
    np.add.at(borders, placed.start_P, 1)
    np.add.at(borders, placed.start_P + placed.length_P, -1)
    return np.cumsum(borders[:-1], dtype=np.int8).astype(np.bool_)


def _without_prompt(flat: FlatTokens, learn_L: NDArray[np.bool_], *, placed: Placed) -> int:
    """Count the trainable tokens of pieces that begin inside a turn, up to the next question."""
    begins_D = np.cumsum(flat.lengths_D) - flat.lengths_D
    cuts = np.append(np.flatnonzero(flat.flags_L & CUT), len(flat.flags_L))
    is_inside_P = (placed.length_P > 0) & ~np.isin(placed.start_P, begins_D) & ~np.isin(placed.start_P, cuts)
    start_P, end_P = placed.start_P[is_inside_P], (placed.start_P + placed.length_P)[is_inside_P]
    end_P = np.minimum(cuts[np.searchsorted(cuts, start_P)], end_P)
    learnt_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(learn_L, dtype=np.int64)])
    return int((learnt_before[end_P] - learnt_before[start_P]).sum())


def _place(pieces: _Pieces, *, seq_len: int, packing: str) -> Placed:
    if packing == "best_fit":
        row_P, column_P, num_rows = best_fit(pieces.length_P, seq_len=seq_len)
    else:
        num_rows = len(pieces.length_P)
        row_P, column_P = np.arange(num_rows), np.zeros(num_rows, np.int64)
    return Placed(pieces.start_P, pieces.length_P, pieces.document_P, row_P, column_P, num_rows)


def _pieces(flat: FlatTokens, *, seq_len: int, long_documents: str, counts: Counter[str]) -> _Pieces:
    """Cut every document into pieces; only those longer than a row take a Python loop."""
    begin_D = np.cumsum(flat.lengths_D) - flat.lengths_D
    documents = np.arange(flat.num_documents)
    short = flat.lengths_D <= seq_len
    parts = [_Pieces(begin_D[short], flat.lengths_D[short], documents[short])]
    for index in np.flatnonzero(~short).tolist():
        tokens = flat.document(index, start=int(begin_D[index]))
        ranges = _ranges_of_long(tokens, seq_len=seq_len, long_documents=long_documents, counts=counts)
        ranges_R2 = np.array(ranges, np.int64).reshape(-1, 2)
        starts = ranges_R2[:, 0] + begin_D[index]
        parts.append(_Pieces(starts, ranges_R2[:, 1] - ranges_R2[:, 0], np.full(len(starts), index)))
    joined = _Pieces(
        np.concatenate([part.start_P for part in parts]),
        np.concatenate([part.length_P for part in parts]),
        np.concatenate([part.document_P for part in parts]),
    )
    return joined.take(np.argsort(joined.document_P, kind="stable"))


def _ranges_of_long(
    tokens: Tokens, *, seq_len: int, long_documents: str, counts: Counter[str]
) -> list[tuple[int, int]]:
    """Return (begin, end) of each piece of a document longer than a row."""
    if long_documents == "drop":
        counts["too_long"] += 1
        return []
    if long_documents == "split":
        counts["documents_split"] += 1
        return split_points(tokens, max_tokens=seq_len)
    cut, kind = truncate(tokens, max_tokens=seq_len)
    counts["documents_truncated"] += 1
    counts["documents_truncated_in_turn"] += kind == "in_turn"
    counts["tokens_dropped"] += len(tokens.ids) - len(cut.ids)
    return [(0, len(cut.ids))]


def _fill(rows: Rows, arrays: Mapping[str, NDArray[Any]], *, placed: Placed) -> None:
    """Copy all pieces into the rows, with one vectorised assignment per array."""
    length_P = placed.length_P
    # Half the memory of int64; a window has some 2^23 tokens.
    index = np.int32 if max(rows.ids_NT.size, arrays["ids"].size) < 2**31 else np.int64
    before_P = (np.cumsum(length_P) - length_P).astype(index)
    within = np.arange(int(length_P.sum()), dtype=index) - np.repeat(before_P, length_P)
    source = np.repeat(placed.start_P.astype(index), length_P) + within
    target = np.repeat((placed.row_P * rows.seq_len + placed.column_P).astype(index), length_P) + within
    for name, array_L in arrays.items():
        rows.array(name).reshape(-1)[target] = array_L[source]
    rows.positions_NT.reshape(-1)[target] = within
    rows.segments_NT.reshape(-1)[target] = np.repeat(_rank_in_row(placed.row_P, placed.column_P), length_P)


def _rank_in_row(row_P: Index, column_P: Index) -> Index:
    """Return each piece's rank in its row: 1 for the leftmost."""
    order = np.lexsort((column_P, row_P))
    first = np.searchsorted(row_P[order], row_P[order], side="left")
    rank_P = np.empty(len(order), np.int64)
    rank_P[order] = np.arange(len(order)) - first + 1
    return rank_P


def best_fit(length_P: Index, *, seq_len: int) -> tuple[Index, Index, int]:
    """Return row and column of every piece and the number of rows: longest first, into the fullest row.

    `open_rows[s]` are the rows with s tokens of space; bit s of `spaces` is set when there is one,
    so the least sufficient space is the lowest bit at or above the length: O(P * T / 64).
    """
    row_P, column_P = np.zeros(len(length_P), np.int64), np.zeros(len(length_P), np.int64)
    open_rows: list[list[int]] = [[] for _ in range(seq_len + 1)]
    spaces, num_rows = 0, 0
    order = np.argsort(-length_P, kind="stable")
    for piece, length in zip(order.tolist(), length_P[order].tolist(), strict=True):
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
