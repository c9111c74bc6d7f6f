"""Mean loss of each pass over a stage's rows, from the reports that are read for log records anyway.

A step belongs to the pass in which its first row lies, so a pass is whole steps: at its border a batch may hold the
last rows of one and the first of the next. Means are over supervised tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tpu_experiments.checkpoint.progress import EpochRecord
from tpu_experiments.data.replay import ReplayedRows
from tpu_experiments.training.meters import Reading


@dataclass(frozen=True)
class Passes:
    """The passes of one stage over its rows."""

    rows: ReplayedRows
    global_rows: int
    num_steps: int
    """Of the stage, if it does not end before."""
    offset: int
    """Steps of the run before its first one."""

    def epoch_of(self, step: int) -> int:
        """The pass, from 1, of a step of the run, from 1."""
        taken = (step - 1 - self.offset) * self.global_rows
        return (taken - self.rows.num_replayed(taken)) // self.rows.num_rows + 1

    def is_over(self, epoch: int, *, step: int) -> bool:
        """Whether every row of a pass was in a batch up to this step of the run."""
        taken = (step - self.offset) * self.global_rows
        is_last = step - self.offset == self.num_steps
        own = taken - self.rows.num_replayed(taken)
        return own >= epoch * self.rows.num_rows if is_last else self.epoch_of(step + 1) > epoch


def count(reading: Reading, records: list[EpochRecord], passes: Passes) -> Iterator[EpochRecord]:
    """Add a log record's losses to those of their passes; yields each pass that is over."""
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
    """exp(loss); infinity where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
