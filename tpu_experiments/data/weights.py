"""Weighted mixing of sources, exact at every step and computed from the step alone.

With r_i a source's share of the rows, c_0 = floor(n r_0) of the first n rows are of source 0, of the n - c_0 left
c_1 = floor((n - c_0) r_1 / (1 - r_0)) are of source 1, and so on; the last source has the rest. From n to n + 1 exactly
one c_i grows, by 1, and c_i stays within i + 1 rows of n r_i.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.data.batches import OrderedRows
from tpu_experiments.data.rows import Rows, empty


def row_shares(weights: Sequence[float], *, tokens_per_row: Sequence[Fraction]) -> list[Fraction]:
    """Return the shares of rows under which the sources' token counts are proportional to the weights.

    Args:
        weights: of each source, as configured.
        tokens_per_row: mean of each source, without padding.
    """
    # The decimal as configured: 0.1 has no exact binary representation.
    rows = [Fraction(str(weight)) / tokens for weight, tokens in zip(weights, tokens_per_row, strict=True)]
    return [row / sum(rows) for row in rows]


class WeightedRows(OrderedRows):
    """Rows of several sources, mixed by shares of the rows; each source passes through epochs of its own.

    An epoch has as many positions as the sources have rows together. A source whose share is above its part of these
    rows restarts within the epoch, in another order; one with a smaller share continues in the next epoch.
    """

    def __init__(self, parts: Sequence[OrderedRows], *, shares: Sequence[Fraction]) -> None:
        """Combine `parts`, each of one source; the shares sum to 1."""
        assert sum(shares) == 1, f"shares {shares} come to {sum(shares)}"
        super().__init__(
            seq_len=parts[0].seq_len,
            names=[name for part in parts for name in part.names],
            counts=[part.num_rows for part in parts],
        )
        self.parts, self.shares = tuple(parts), tuple(shares)

    def drawn(self, num_rows: int) -> list[int]:
        """Return the number of rows of each source among the first `num_rows` of a stage."""
        counts, left, share = [], num_rows, Fraction(1)
        for own in self.shares[:-1]:
            counts.append(math.floor(left * own / share))
            left, share = left - counts[-1], share - own
        return [*counts, left]

    def read(self, epoch: int, *, start: int, stop: int) -> tuple[Rows, NDArray[np.int64]]:
        """Return rows and origins, as `OrderedRows.read` does, source after source."""
        before, after = (self.drawn(epoch * self.num_rows + offset) for offset in (start, stop))
        pieces: list[Rows] = [empty(self.seq_len)]
        origins: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        for part, end, first, last in zip(self.parts, self._ends, before, after, strict=True):
            while first < last:
                own_epoch, offset = divmod(first, part.num_rows)
                count = min(last - first, part.num_rows - offset)
                rows, own_origins = part.read(own_epoch, start=offset, stop=offset + count)
                pieces.append(rows)
                origins.append(own_origins + (end - part.num_rows))
                first += count
        return Rows.concatenate(pieces), np.concatenate(origins)
