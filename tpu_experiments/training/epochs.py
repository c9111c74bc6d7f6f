"""Mean training loss of each pass (epoch) over a stage's rows, from the readings of the log records.

A step counts for the pass of its first row, so a pass consists of whole steps: at a boundary, one batch may hold the
last rows of one pass and the first of the next. Means are over supervised tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tpu_experiments.checkpoint.progress import EpochRecord
from tpu_experiments.data.replay import ReplayedRows
from tpu_experiments.training.meters import Reading


@dataclass(frozen=True)
class Passes:
    """Mapping from steps to passes for one stage."""

    rows: ReplayedRows
    global_rows: int
    num_steps: int
    """Steps of the stage, unless it ends early."""
    offset: int
    """Steps of the run before this stage."""

    def epoch_of(self, step: int) -> int:
        """Return the pass (from 1) of a step of the run (from 1)."""
        taken = (step - 1 - self.offset) * self.global_rows
        return (taken - self.rows.num_replayed(taken)) // self.rows.num_rows + 1

    def is_over(self, epoch: int, *, step: int) -> bool:
        """Return whether all rows of a pass have been trained on after this step of the run."""
        taken = (step - self.offset) * self.global_rows
        is_last = step - self.offset == self.num_steps
        own = taken - self.rows.num_replayed(taken)
        return own >= epoch * self.rows.num_rows if is_last else self.epoch_of(step + 1) > epoch


def count(reading: Reading, records: list[EpochRecord], passes: Passes) -> Iterator[EpochRecord]:
    """Add a reading's losses to `records`, in place, and yield each pass that has just been completed."""
    for (step, loss), supervised in zip(reading.losses, reading.supervised, strict=True):
        epoch = passes.epoch_of(step)
        if not records or records[-1].epoch != epoch:
            records.append(EpochRecord(epoch))
        records[-1].steps += 1
        records[-1].supervised += supervised
        records[-1].loss_sum += loss * supervised
    for record in records:
        if not record.is_over and passes.is_over(record.epoch, step=reading.step):
            record.is_over = True
            yield record


def perplexity(loss: float) -> float:
    """Return exp(loss) for a loss in nats per token; infinity if that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
