"""Rows to global batches of G rows; a position in the data is (stage, epoch, index).

`StageRows.batch(step)` depends on its arguments and the seed alone, so that resuming is arithmetic.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.data.rows import Rows, padding

PADDING_LABEL = "-"
KEPT_EPOCHS = 2  # a batch spans at most this many, as long as a stage has G rows


@dataclass(frozen=True, eq=False)
class Batch:
    """Int32 arrays of shape (G, T), as in `Rows`, and one label `source:row` for each row."""

    ids_GT: NDArray[np.int32]
    learn_GT: NDArray[np.int32]
    positions_GT: NDArray[np.int32]
    segments_GT: NDArray[np.int32]
    labels: list[str]

    @property
    def num_rows(self) -> int:
        return self.ids_GT.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int(np.count_nonzero(self.segments_GT))

    @property
    def num_supervised(self) -> int:
        """Tokens that are predicted."""
        return int(np.count_nonzero(self.learn_GT))

    def slice_process(self, rank: int, world_size: int) -> "Batch":
        """The contiguous share of process `rank`; `world_size` divides G."""
        share, rest = divmod(self.num_rows, world_size)
        assert rest == 0, f"{self.num_rows} rows do not divide over {world_size} processes"
        part = slice(rank * share, (rank + 1) * share)
        return Batch(
            self.ids_GT[part],
            self.learn_GT[part],
            self.positions_GT[part],
            self.segments_GT[part],
            self.labels[part],
        )


class StageRows:
    """The rows of one stage: its sources' rows one after the other, shuffled anew every epoch."""

    def __init__(self, parts: Sequence[Rows], *, names: Sequence[str], seed: int, stage_index: int) -> None:
        assert len(parts) == len(names), "one name for each source"
        self.rows = Rows.concatenate(parts)
        self.names = tuple(names)
        self.seed = seed
        self.stage_index = stage_index
        self._ends = np.cumsum([part.num_rows for part in parts])
        self._orders: dict[int, NDArray[np.int64]] = {}

    @property
    def num_rows(self) -> int:
        return self.rows.num_rows

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Permutation of the rows in this epoch, shape (num_rows,)."""
        if epoch not in self._orders:
            key = np.array([self.seed % 2**64, self.stage_index << 32 | epoch], np.uint64)
            generator = np.random.Generator(np.random.Philox(key=key))
            while len(self._orders) >= KEPT_EPOCHS:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = generator.permutation(self.num_rows)
        return self._orders[epoch]

    def locate(self, position: int) -> tuple[int, int]:
        """(epoch, index of the row) at a position counted from the stage's start."""
        epoch, offset = divmod(position, self.num_rows)
        return epoch, int(self.order(epoch)[offset])

    def label(self, index: int) -> str:
        """`source:row`, the row counted from 0 in its source."""
        source = int(np.searchsorted(self._ends, index, side="right"))
        start = int(self._ends[source - 1]) if source else 0
        return f"{self.names[source]}:{index - start}"

    def batch(self, step: int, *, global_rows: int, num_total: int | None = None) -> Batch:
        """Rows at positions step * G ... (step + 1) * G - 1, on into the next epochs.

        Positions from `num_total` on, in the last batch of a stage measured in epochs, are padding.
        """
        start = step * global_rows
        stop = start + global_rows if num_total is None else min(start + global_rows, num_total)
        located = [self.locate(position)[1] for position in range(start, stop)]
        rows = self.rows.take(np.array(located, np.int64))
        return _batch(rows, labels=[self.label(i) for i in located], global_rows=global_rows)

    def total_for(self, epochs: float) -> int:
        """Positions in that many epochs: `num_total` of `batch`."""
        # The decimal that was written: 0.07 * 100 is 7.000000000000001 in binary.
        return math.ceil(Fraction(str(epochs)) * self.num_rows)

    def steps_for(self, epochs: float, *, global_rows: int) -> int:
        """Steps that cover that many epochs; the last batch may be part padding."""
        return math.ceil(Fraction(str(epochs)) * self.num_rows / global_rows)


def fixed_batches(rows: Rows, *, global_rows: int, name: str = "held_out") -> Iterator[Batch]:
    """All rows once, in order, for evaluation; the last batch is filled up with padding."""
    for start in range(0, rows.num_rows, global_rows):
        part = rows.take(slice(start, start + global_rows))
        labels = [f"{name}:{start + i}" for i in range(part.num_rows)]
        yield _batch(part, labels=labels, global_rows=global_rows)


def _batch(rows: Rows, *, labels: list[str], global_rows: int) -> Batch:
    missing = global_rows - rows.num_rows
    if missing > 0:
        rows = Rows.concatenate([rows, padding(missing, seq_len=rows.seq_len)])
    return Batch(
        ids_GT=rows.ids_NT,
        learn_GT=rows.learn_NT.astype(np.int32),
        positions_GT=rows.positions_NT,
        segments_GT=rows.segments_NT,
        labels=labels + [PADDING_LABEL] * missing,
    )
