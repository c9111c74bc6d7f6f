"""Global batches of G rows; a position in the data is (stage, epoch, index).

`OrderedRows.batch(step)` depends on its arguments and the seed alone, so resuming takes no state.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.rows import TOKEN_ARRAYS, Rows, RowSource, empty, padding

PADDING_LABEL = "-"
KEPT_EPOCHS = 2  # a batch spans at most this many, as long as a stage has G rows


@dataclass(frozen=True, eq=False)
class Batch:
    """One global batch: arrays as in `Rows`, the four of tokens int32 (G, T), and a label `source:row` per row."""

    ids_GT: NDArray[np.int32]
    learn_GT: NDArray[np.int32]
    positions_GT: NDArray[np.int32]
    segments_GT: NDArray[np.int32]
    labels: list[str]
    noise_G: NDArray[np.int32] | None = None
    """A random word per row, for dropout."""
    more: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Further arrays (G, T), (G, T, K) or (G,) by name."""

    @staticmethod
    def of(
        arrays: Mapping[str, NDArray[Any]], *, labels: list[str], noise_G: NDArray[np.int32] | None = None
    ) -> "Batch":
        """Return the batch with these arrays by name, as `arrays` returns them."""
        more = {name: array for name, array in arrays.items() if name not in TOKEN_ARRAYS}
        ids, learn, positions, segments = (arrays[name] for name in TOKEN_ARRAYS)
        return Batch(ids, learn, positions, segments, labels, noise_G, more)

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the four arrays of tokens and the further ones by the names of their tensors."""
        return {name: getattr(self, f"{name}_GT") for name in TOKEN_ARRAYS} | dict(self.more)

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

    @property
    def num_answers(self) -> int:
        """Segments with tokens that are predicted."""
        row_K, column_K = np.nonzero(self.learn_GT)
        place_K = row_K * (self.learn_GT.shape[1] + 1) + self.segments_GT[row_K, column_K]
        return int(np.count_nonzero(np.diff(place_K, prepend=-1)))

    def slice_process(self, rank: int, world_size: int) -> "Batch":
        """Return the contiguous share of process `rank`; `world_size` divides G."""
        share, rest = divmod(self.num_rows, world_size)
        assert rest == 0, f"{self.num_rows} rows do not divide over {world_size} processes"
        part = slice(rank * share, (rank + 1) * share)
        return Batch.of(
            {name: array[part] for name, array in self.arrays.items()},
            labels=self.labels[part],
            noise_G=None if self.noise_G is None else self.noise_G[part],
        )


class OrderedRows(ABC):
    """A stage's rows in some order, over its epochs.

    The rows of its sources, concatenated, are numbered from 0; that number is a row's origin.
    """

    def __init__(self, *, seq_len: int, names: Sequence[str], counts: Sequence[int]) -> None:
        assert len(counts) == len(names), "one name for each source"
        self.seq_len = seq_len
        self.names, self.counts = tuple(names), tuple(counts)
        self.num_rows = sum(counts)
        self._ends = np.cumsum(counts)

    @abstractmethod
    def read(self, epoch: int, *, start: int, stop: int) -> tuple[Rows, NDArray[np.int64]]:
        """Return the rows at offsets `start` to `stop` of an epoch, and their origins, shape (stop - start,)."""

    def batch(self, step: int, *, global_rows: int, num_total: int | None = None) -> Batch:
        """Return the rows at positions step * G ... (step + 1) * G - 1, across epoch borders.

        Positions from `num_total` on, in the last batch of a stage measured in epochs, are padding.
        """
        start = step * global_rows
        rows, labels = self.between(start, start + global_rows, num_total=num_total)
        return one_batch(rows, labels=labels, global_rows=global_rows)

    def between(self, start: int, stop: int, *, num_total: int | None = None) -> tuple[Rows, list[str]]:
        """Return the rows at positions `start` to `stop` below `num_total`, and their labels."""
        stop = stop if num_total is None else min(stop, num_total)
        pieces: list[Rows] = []
        labels: list[str] = []
        while start < stop:
            epoch, offset = divmod(start, self.num_rows)
            count = min(stop - start, self.num_rows - offset)
            rows, origins_M = self.read(epoch, start=offset, stop=offset + count)
            pieces.append(rows)
            labels += [self.label(origin) for origin in origins_M.tolist()]
            start += count
        return Rows.concatenate(pieces or [empty(self.seq_len)]), labels

    def label(self, origin: int) -> str:
        """Return `source:row`, the row counted from 0 in its source."""
        source = int(np.searchsorted(self._ends, origin, side="right"))
        start = int(self._ends[source - 1]) if source else 0
        return f"{self.names[source]}:{origin - start}"

    def total_for(self, epochs: float) -> int:
        """Return the number of positions in that many epochs, the `num_total` of `batch`."""
        # The decimal as configured: 0.07 * 100 is 7.000000000000001 in binary.
        return math.ceil(Fraction(str(epochs)) * self.num_rows)

    def steps_for(self, epochs: float, *, global_rows: int) -> int:
        """Return the steps that cover that many epochs; the last batch may be partly padding."""
        return math.ceil(Fraction(str(epochs)) * self.num_rows / global_rows)


class StageRows(OrderedRows):
    """Rows of one stage, shuffled anew every epoch; read from their sources on demand."""

    def __init__(self, parts: Sequence[RowSource], *, names: Sequence[str], seed: int, stage_index: int) -> None:
        assert len({part.seq_len for part in parts}) == 1, "sources of several row lengths"
        super().__init__(seq_len=parts[0].seq_len, names=names, counts=[part.num_rows for part in parts])
        self.parts = tuple(parts)
        self.seed = seed
        self.stage_index = stage_index
        self._orders: dict[int, NDArray[np.int64]] = {}

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the permutation of the rows in this epoch, shape (num_rows,)."""
        if epoch not in self._orders:
            key = np.array([self.seed % 2**64, self.stage_index << 32 | epoch], np.uint64)
            generator = np.random.Generator(np.random.Philox(key=key))
            while len(self._orders) >= KEPT_EPOCHS:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = generator.permutation(self.num_rows)
        return self._orders[epoch]

    def read(self, epoch: int, *, start: int, stop: int) -> tuple[Rows, NDArray[np.int64]]:
        """Return rows and origins, as `OrderedRows.read` does."""
        origins_M = self.order(epoch)[start:stop]
        return self.take(origins_M), origins_M

    def take(self, origins_M: NDArray[np.int64]) -> Rows:
        """Return rows by their origin, shape (M, T), with one read per source."""
        source_M = np.searchsorted(self._ends, origins_M, side="right")
        pieces, places = [], []
        for source in np.unique(source_M):
            places.append(np.flatnonzero(source_M == source))
            first = self._ends[source] - self.parts[source].num_rows
            pieces.append(self.parts[source].take(origins_M[places[-1]] - first))
        if len(pieces) == 1:
            return pieces[0]
        return Rows.concatenate(pieces).take(np.argsort(np.concatenate(places)))


class WrittenRows(OrderedRows):
    """Rows of one stage in epochs written in shuffled order, for sequential reading."""

    def __init__(
        self,
        epochs: Sequence[RowSource],
        *,
        origins: Sequence[NDArray[np.int64]],
        names: Sequence[str],
        counts: Sequence[int],
        num_positions: int,
    ) -> None:
        """Combine written epochs; `origins[e][i]` is the origin of row i of epoch e.

        The stage takes `num_positions` rows.

        Raises:
            ConfigError: they take more epochs than were written.
        """
        needed = -(-num_positions // sum(counts))
        if needed > len(epochs):
            raise ConfigError(
                f"loader.order=written; the stage needs {needed} epochs and {len(epochs)} were written; set "
                f"prepare.written_epochs={needed}."
            )
        super().__init__(seq_len=epochs[0].seq_len, names=names, counts=counts)
        assert all(part.num_rows == len(o) == self.num_rows for part, o in zip(epochs, origins, strict=True))
        self.epochs, self.origins = tuple(epochs), tuple(origins)

    def read(self, epoch: int, *, start: int, stop: int) -> tuple[Rows, NDArray[np.int64]]:
        """Return rows and origins, as `OrderedRows.read` does."""
        return self.epochs[epoch].take(slice(start, stop)), self.origins[epoch][start:stop]


def trimmed(batch: Batch, *, multiple: int) -> Batch:
    """Drop the columns that are padding in every row; T stays a multiple of `multiple`, or is unchanged."""
    used_T = np.flatnonzero(batch.segments_GT.any(axis=0))
    longest = int(used_T[-1]) + 1 if len(used_T) else 1
    kept = slice(0, -(-longest // multiple) * multiple)
    cut = {n: np.ascontiguousarray(a[:, kept]) if a.ndim > 1 else a for n, a in batch.arrays.items()}
    return Batch.of(cut, labels=batch.labels)


def fixed_batches(rows: RowSource, *, global_rows: int, name: str = "held_out") -> Iterator[Batch]:
    """Yield all rows once, in order, for evaluation; the last batch is padded."""
    for start in range(0, rows.num_rows, global_rows):
        part = rows.take(slice(start, start + global_rows))
        labels = [f"{name}:{start + i}" for i in range(part.num_rows)]
        yield one_batch(part, labels=labels, global_rows=global_rows)


def with_all_tokens_learnt(batch: Batch) -> Batch:
    """Return the batch with every token in the loss that has one before it in its document."""
    learn_GT = ((batch.positions_GT > 0) & (batch.segments_GT > 0)).astype(np.int32)
    return replace(batch, learn_GT=learn_GT)


def one_batch(rows: Rows, *, labels: list[str], global_rows: int) -> Batch:
    """Return the rows as a batch, padded to `global_rows`."""
    missing = global_rows - rows.num_rows
    if missing > 0:
        rows = Rows.concatenate([rows, padding(missing, seq_len=rows.seq_len)])
    return Batch(
        ids_GT=rows.ids_NT,
        learn_GT=rows.learn_NT.astype(np.int32),
        positions_GT=rows.positions_NT,
        segments_GT=rows.segments_NT,
        labels=labels + [PADDING_LABEL] * missing,
        more=rows.more,
    )
