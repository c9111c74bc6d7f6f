"""Fuller rows: some pieces of documents that are longer than a row are cut again, to fill the gaps of other rows.

Best-fit packing leaves gaps where most pieces are a little longer than half a row. A document that is longer than a row
is in pieces anyway, so a row of such pieces only can be taken apart: its tokens go, in order, into gaps of at least a
sixteenth of a row, and the row is gone. The emptiest rows are taken apart first, as long as the others have room.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]
SMALLEST_SHARE = 16  # of a row; a shorter piece teaches little


@dataclass(frozen=True, eq=False)
class Placed:
    """P pieces in N rows: their tokens, the documents they are of, and where each lies."""

    start_P: Index
    length_P: Index
    document_P: Index
    row_P: Index
    column_P: Index
    num_rows: int


Chunk = tuple[int, int, int, int, int]
"""Start, length, document, row and column of a piece."""


def fill_gaps(placed: Placed, *, is_split_D: NDArray[np.bool_], seq_len: int) -> Placed:
    """The same tokens in fewer rows; only pieces of the documents in `is_split_D` are cut."""
    used_N = np.bincount(placed.row_P, weights=placed.length_P, minlength=placed.num_rows).astype(np.int64)
    is_whole_P = ~is_split_D[placed.document_P]
    is_fixed_N = np.bincount(placed.row_P, weights=is_whole_P, minlength=placed.num_rows) > 0
    taken, chunks = _Pouring(placed, used_N=used_N, is_fixed_N=is_fixed_N, seq_len=seq_len).run()
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


class _Pouring:
    """Rows are taken apart one after the other, until the gaps of the others are full."""

    def __init__(self, placed: Placed, *, used_N: Index, is_fixed_N: NDArray[np.bool_], seq_len: int) -> None:
        self.placed, self.used_N, self.seq_len = placed, used_N, seq_len
        self.smallest = max(1, seq_len // SMALLEST_SHARE)
        by_use = np.argsort(used_N, kind="stable")
        self.donors = by_use[~is_fixed_N[by_use]]
        # The gaps of rows that stay come first, the widest first; then those of the fullest rows that could go.
        gaps = np.concatenate([by_use[is_fixed_N[by_use]], self.donors[::-1]])
        self.gaps = gaps[seq_len - used_N[gaps] >= self.smallest].tolist()
        self.pieces = np.argsort(placed.row_P, kind="stable")
        self.firsts = np.searchsorted(placed.row_P[self.pieces], np.arange(placed.num_rows + 1))

    def run(self) -> tuple[list[int], list[Chunk]]:
        """Rows that are gone, and the chunks that their pieces became."""
        taken: list[int] = []
        chunks: list[Chunk] = []
        next_gap = 0
        for row in self.donors.tolist():
            poured = self._pour(row, next_gap)
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

    def _pour(self, row: int, next_gap: int) -> tuple[list[Chunk], int] | None:
        """The row's chunks, and the first gap that is left; None when there is no room, or only in rows filled before.

        A chunk shorter than `smallest` is left over only from a piece of less than two of them.
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
