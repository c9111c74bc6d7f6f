"""What a trainer does with the reports of its steps: log them, count them, and have the guard look at them."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from tpu_experiments.training.epochs import Passes, count
from tpu_experiments.training.parts import Parts
from tpu_experiments.training.window import Reading


class Watched(Parts):
    """Base of `Trainer` that reads, logs and counts the reports of steps."""

    passes: Passes
    """Of the stage that is trained."""

    def record(self, readings: list[Reading]) -> None:
        """Log readings, apply the guard, and keep the stage's first and last loss."""
        for reading in readings:
            if self.guard.wish is not None:
                return  # what comes later is undone, and is not the same in every process
            stage = self.progress.stages[-1]
            if reading.losses:
                if stage.first_train_loss is None:
                    stage.first_train_loss = reading.losses[0][1]
                stage.last_train_loss = reading.losses[-1][1]
            self.guard.look(reading, self.progress)
            self.guard.judge(reading, self.progress.guard)
            meters = self.meters.values(reading)
            self.outputs.training(reading, stage=stage.name, meters=meters, groups=list(self.norm_groups))
            if any(map(math.isnan, reading.supervised)):
                stage.epochs = None
            if stage.epochs is not None:
                for epoch in count(reading, stage.epochs, self.passes):
                    self.outputs.epoch(reading.step, epoch)

    def settle(self) -> None:
        """Wait for the device, and record the steps it has done."""
        self.runtime.wait()
        self.record(self.window.drain())

    def read_rest(self) -> None:
        """Read the steps since the last record, if a stage ends before one is due."""
        steps = self.window.close()
        if steps:
            self.window.read(steps)

    def heed_guard(self) -> None:
        """Leave the stage if any process's guard requests a rollback; all call it at the same step.

        Raises:
            RollBack: the same in every process.
        """
        if self.runtime.any_process(self.guard.wish is not None):
            self.settle()  # after it every process has read the same reports
            assert self.guard.wish is not None, "two processes have read different losses"
            raise self.guard.wish

    def is_sound(self) -> bool:
        """Return whether the last step's update was applied.

        A checkpoint within a streak of skipped updates would push out a good one.
        """
        self.settle()
        self.look_at_unread()
        return not self.progress.guard.streak

    def look_at_unread(self) -> None:
        """Pass all steps so far to the guard, whether a record is due or not; call it after `settle`."""
        reading = self.window.unread()
        if reading is not None:
            self.guard.look(reading, self.progress)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count compilation and tokens of a stage, also if it is left early."""
        compiling, tokens = self.runtime.counters().compile_seconds, self.progress.tokens
        try:
            yield
        finally:
            self.train_compile_seconds += self.runtime.counters().compile_seconds - compiling
            self.train_tokens += self.progress.tokens - tokens
