"""Measures of how well an order of rows is mixed, relative to a uniform random permutation.

An order is `origins_N`: the old index of the row at each new position, a permutation of 0 ... N - 1. Old indices count
through the sources one after the other. Under a uniform permutation all measures but the correlations are near 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Mixing:
    """Measures of one order; None where there are too few rows or sources."""

    displacement: float | None
    """Mean of |new - old| / N over its expectation (N^2 - 1) / (3 N^2): 0 for the old order, 1 for a random one."""
    rank_correlation: float | None
    """Spearman's 1 - 6 sum (new - old)^2 / (N (N^2 - 1)): 1 for the old order, 0 +- 1/sqrt(N - 1) for a random one."""
    source_correlation: float | None
    """Spearman's correlation within each source, by ranks among its own rows; mean weighted by rows."""
    near_pairs: float | None
    """Share of new neighbours with |old - old'| <= near_rows over its expectation k (2N - k - 1) / (N (N - 1))."""
    source_spread: float | None
    """sqrt(sum of squared deviations of a source's rows in a batch from w p / sum of the variances of drawing without
    replacement, w p (1 - p) (N - w) / (N - 1)), over whole batches of w rows; 0 is an even mix, 1 a random one."""
    neighbours_together: float | None
    """Share of old neighbours of one source that are in the same whole batch over its expectation:
    whole batches * w (w - 1) / (N (N - 1))."""


def measure_mixing(
    origins_N: NDArray[np.int64], *, sizes: Sequence[int], batch_rows: int = 256, near_rows: int
) -> Mixing:
    """Return the measures of `origins_N`, an order of sources with `sizes` rows, whose sum is N.

    Memory is about 10 arrays of N int64.

    Raises:
        ValueError: `origins_N` is not a permutation of the rows.
    """
    num_rows = int(sum(sizes))
    seen_N = np.zeros(num_rows, np.bool_)
    seen_N[origins_N[(origins_N >= 0) & (origins_N < num_rows)]] = True
    if len(origins_N) != num_rows or not seen_N.all():
        raise ValueError(f"the order has {len(origins_N)} places and {int(seen_N.sum())} of {num_rows} rows")
    sources_N = np.searchsorted(np.cumsum(sizes), origins_N, side="right")
    return Mixing(
        displacement=_displacement(origins_N),
        rank_correlation=_correlation(origins_N),
        source_correlation=_source_correlation(origins_N, sources_N=sources_N, sizes=sizes),
        near_pairs=_near_pairs(origins_N, near_rows=near_rows),
        source_spread=_source_spread(sources_N, sizes=sizes, batch_rows=batch_rows),
        neighbours_together=_neighbours_together(origins_N, sizes=sizes, batch_rows=batch_rows),
    )


def _displacement(origins_N: NDArray[np.int64]) -> float | None:
    num_rows = len(origins_N)
    if num_rows < 2:
        return None
    moved = float(np.abs(origins_N - np.arange(num_rows)).mean())
    return moved / ((num_rows**2 - 1) / (3 * num_rows))


def _correlation(origins_N: NDArray[np.int64]) -> float | None:
    num_rows = len(origins_N)
    if num_rows < 2:
        return None
    moved_N = (origins_N - np.arange(num_rows)).astype(np.float64)  # the sum of squares passes 2^63 at 4 million rows
    return 1 - 6 * float(moved_N @ moved_N) / (num_rows * (num_rows**2 - 1))


def _source_correlation(
    origins_N: NDArray[np.int64], *, sources_N: NDArray[np.int64], sizes: Sequence[int]
) -> float | None:
    starts = np.cumsum([0, *sizes])
    total, weight = 0.0, 0
    for source, size in enumerate(sizes):
        correlation = _correlation(origins_N[sources_N == source] - starts[source])
        if correlation is not None:
            total, weight = total + correlation * size, weight + size
    return total / weight if weight else None


def _near_pairs(origins_N: NDArray[np.int64], *, near_rows: int) -> float | None:
    num_rows, near = len(origins_N), min(near_rows, len(origins_N) - 1)
    if num_rows < 2 or near < 1:
        return None
    share = float((np.abs(np.diff(origins_N)) <= near).mean())
    return share / (near * (2 * num_rows - near - 1) / (num_rows * (num_rows - 1)))


def _source_spread(sources_N: NDArray[np.int64], *, sizes: Sequence[int], batch_rows: int) -> float | None:
    num_rows = len(sources_N)
    num_batches = num_rows // batch_rows
    if num_batches < 1 or num_rows <= batch_rows:
        return None
    whole_BW = sources_N[: num_batches * batch_rows].reshape(num_batches, batch_rows)
    squares, variance = 0.0, 0.0
    for source, size in enumerate(sizes):
        share = size / num_rows
        squares += float(((np.count_nonzero(whole_BW == source, axis=1) - batch_rows * share) ** 2).sum())
        variance += num_batches * batch_rows * share * (1 - share) * (num_rows - batch_rows) / (num_rows - 1)
    return float(np.sqrt(squares / variance)) if variance > 0 else None


def _neighbours_together(origins_N: NDArray[np.int64], *, sizes: Sequence[int], batch_rows: int) -> float | None:
    num_rows = len(origins_N)
    num_batches = num_rows // batch_rows
    chance = num_batches * batch_rows * (batch_rows - 1) / (num_rows * (num_rows - 1)) if num_rows > 1 else 0.0
    batches_N = np.empty(num_rows, np.int64)
    batches_N[origins_N] = np.arange(num_rows) // batch_rows
    same = (batches_N[1:] == batches_N[:-1]) & (batches_N[1:] < num_batches)
    one_source = np.ones(max(num_rows - 1, 0), np.bool_)
    ends = np.cumsum(sizes, dtype=np.int64)[:-1]
    one_source[ends[(ends > 0) & (ends < num_rows)] - 1] = False
    if chance == 0 or not one_source.any():
        return None
    return float(same[one_source].mean()) / chance
