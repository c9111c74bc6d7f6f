"""Mixing of replayed rows into a stage, exact at every step and computed from the step alone."""

import math
from dataclasses import dataclass
from fractions import Fraction

from tpu_experiments.data.batches import Batch, OrderedRows, one_batch
from tpu_experiments.data.rows import Rows


@dataclass(frozen=True)
class ReplayedRows:
    """A stage's rows with a share of replayed ones: floor(n x share) of its first n rows, by default 0.

    Replayed rows follow the stage's own in each batch. Both kinds pass through their epochs separately, and positions
    count separately too: `num_total` counts the stage's own rows.
    """

    own: OrderedRows
    replayed: OrderedRows | None = None
    share: Fraction = Fraction(0)
    """In [0, 1); above 0 only with `replayed`."""

    @property
    def num_rows(self) -> int:
        """Rows of the stage's own sources."""
        return self.own.num_rows

    def num_replayed(self, num_rows: int) -> int:
        """Return the number of replayed rows among the first `num_rows`."""
        return math.floor(num_rows * self.share)

    def batch(self, step: int, *, global_rows: int, num_total: int | None = None) -> Batch:
        """Return the batch of a step, as `OrderedRows.batch` does; padding comes after the replayed rows."""
        if self.replayed is None:
            return self.own.batch(step, global_rows=global_rows, num_total=num_total)
        first, last = step * global_rows, (step + 1) * global_rows
        before, after = self.num_replayed(first), self.num_replayed(last)
        own, own_labels = self.own.between(first - before, last - after, num_total=num_total)
        others, other_labels = self.replayed.between(before, after)
        return one_batch(Rows.concatenate([own, others]), labels=own_labels + other_labels, global_rows=global_rows)

    def total_for(self, epochs: float) -> int:
        """Return the number of the stage's own rows in that many epochs."""
        return self.own.total_for(epochs)

    def steps_for(self, epochs: float, *, global_rows: int) -> int:
        """Return the steps that cover that many epochs of the stage's own rows."""
        if self.replayed is None:
            return self.own.steps_for(epochs, global_rows=global_rows)
        total = self.total_for(epochs)
        steps = math.ceil(Fraction(total) / global_rows / (1 - self.share))
        while steps > 1 and self._own_rows((steps - 1) * global_rows) >= total:
            steps -= 1
        return steps

    def _own_rows(self, num_rows: int) -> int:
        return num_rows - self.num_replayed(num_rows)
