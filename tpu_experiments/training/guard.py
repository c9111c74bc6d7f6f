"""Guard over losses and gradients: counts skipped updates, detects spikes, and requests rollbacks.

The device itself skips the update of a step that is not finite (training/step.py). The guard processes the step reports
when values are read. Its decisions depend on the reports alone, so a resumed run, and every process of a run, makes the
same ones.
"""

import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tpu_experiments.checkpoint.errors import TrainingStopped
from tpu_experiments.checkpoint.progress import GuardState, Progress
from tpu_experiments.checkpoint.store import latest_step
from tpu_experiments.config.schema import GuardConfig
from tpu_experiments.training.meters import Pending, Reading, Skipped, row_losses

log = logging.getLogger(__name__)
MAX_ROWS = 16
"""Largest number of rows that a message names."""


@dataclass
class RollBack(Exception):
    """Request to return to before step `bad` and to skip the batches of steps `first` to `last`."""

    first: int
    bad: int
    last: int
    reason: str

    def __str__(self) -> str:
        return f"{self.reason}; steps {self.first} to {self.last} are to be skipped"


class Guard:
    """Tracker of one process's bad steps, with its state in `Progress.guard`."""

    def __init__(self, settings: GuardConfig, *, process: tuple[int, int]) -> None:
        self.settings, (self.rank, self.world_size) = settings, process
        self.request: RollBack | None = None
        self._reason = ""

    def after_rollback(self, request: RollBack, *, found: GuardState, before: GuardState) -> GuardState:
        """Return the state after a rollback, from the restored state `found` and the previous one `before`."""
        self.request = None
        passed = [*before.passed_over, [request.first, request.last]]
        log.warning(
            "%s; rolled back to step %d; steps %d to %d are skipped",
            request.reason,
            found.seen,
            request.first,
            request.last,
        )
        return replace(found, rollbacks=before.rollbacks + 1, passed_over=passed)

    def observe(self, reading: Reading, progress: Progress) -> None:
        """Process the steps of a reading that were not seen before, and log the bad ones.

        Raises:
            TrainingStopped: a step was not finite, and `trainer.guard.action=stop`.
        """
        state = progress.guard
        skipped = {each.step: each for each in reading.skipped}
        losses, pending = dict(reading.losses), {each.step: each for each in reading.steps}
        for step in sorted(skipped.keys() | losses.keys()):
            if step <= state.seen:
                continue
            state.seen = step
            if step in skipped and skipped[step].has_overflowed:
                self._note_overflow(skipped[step], progress)
            elif step in skipped:
                self._note_skipped(skipped[step], progress)
            else:
                state.streak = []
                self._note_loss(losses[step], pending.get(step), state=state, step=step)

    def decide(self, reading: Reading, state: GuardState) -> None:
        """Decide, at a log record, whether to roll back."""
        spikes, state.spikes = [step for step in state.spikes if step <= reading.step], []
        if len(state.streak) > self.settings.max_skipped:
            bad, last = state.streak[0], state.streak[-1]
            reason = self._reason or f"{len(state.streak)} steps in a row were not finite"
        elif spikes and self.settings.spike_action == "rollback":
            bad, last, reason = spikes[0], spikes[-1], self._reason or f"the loss jumped at step {spikes[0]}"
        else:
            return
        self.request = RollBack(self._first(bad, state), bad, last, reason)

    def _first(self, bad: int, state: GuardState) -> int:
        """Return the first step to skip: `before_steps` before `bad`, not counting steps skipped already."""
        first, left = bad, self.settings.before_steps
        while left and first > 1:
            first -= 1
            left -= not state.is_skipped(first)
        return first

    def checkpoint_step(self, request: RollBack, state: GuardState, *, folder: str) -> int:
        """Return the step of the checkpoint to roll back to.

        It is the newest from before the skipped steps or, where none is kept, from before the bad ones.

        Raises:
            TrainingStopped: there is none, or the run has rolled back often enough.
        """
        if state.rollbacks >= self.settings.max_rollbacks:
            text = f"the run has rolled back {state.rollbacks} times (trainer.guard.max_rollbacks)"
            raise TrainingStopped(f"{request.reason}; {text}; the last checkpoint is from before; {REMEDY}")
        found = latest_step(folder, before=request.first) or latest_step(folder, before=request.bad)
        if not found:
            raise TrainingStopped(f"{request.reason}; there is no checkpoint from before to go back to; {REMEDY}")
        return found

    def require_finite_end(self, eval_loss: float, state: GuardState) -> None:
        """Refuse to finish a run whose last steps and held-out loss were not finite.

        Raises:
            TrainingStopped: both are not finite.
        """
        if state.streak and not math.isfinite(eval_loss):
            reason = self._reason or f"steps {state.streak[0]} to {state.streak[-1]} were not finite"
            raise TrainingStopped(f"{reason}; and the held-out loss is {eval_loss}; {REMEDY}")

    def _note_skipped(self, skipped: Skipped, progress: Progress) -> None:
        state = progress.guard
        text = self.skipped_sentence(skipped)
        if self.settings.action == "stop":
            raise TrainingStopped(f"{text}; the last checkpoint is from before; {REMEDY}")
        if not state.streak:
            self._reason = text
        state.streak.append(skipped.step)
        state.skipped += 1
        progress.stages[-1].tokens -= skipped.num_tokens
        if self.rank == 0 or skipped.rows:
            log.warning("%s; its update was skipped (%d so far)", text, state.skipped)

    def _note_overflow(self, skipped: Skipped, progress: Progress) -> None:
        """Count a step whose gradients only the loss scale made too large; it says nothing about the run."""
        progress.guard.skipped += 1
        progress.stages[-1].tokens -= skipped.num_tokens
        if self.rank == 0:
            log.info(
                "step %d: gradients overflowed float16 at a loss scale of %s; its update was skipped, the scale halved",
                skipped.step,
                f"{skipped.loss_scale:,.0f}",
            )

    def _note_loss(self, loss: float, pending: Pending | None, *, state: GuardState, step: int) -> None:
        """Compare a finite loss with the median of the steps before it."""
        factor, window = self.settings.spike_factor, self.settings.spike_window
        if factor is None:
            return
        if len(state.recent) == window:
            median = statistics.median(state.recent)
            if loss > factor * median:
                state.spikes.append(step)
                self._reason = spike_sentence(step, loss, median=median, window=window, pending=pending)
                log.warning("%s", self._reason)
        state.recent = [*state.recent, loss][-window:]

    def skipped_sentence(self, skipped: Skipped) -> str:
        """Format what was not finite, and in which rows."""
        if skipped.rows:
            rows = f"rows (source:row): {rows_text(skipped.rows)}"
        elif self.world_size > 1:
            rows = f"rows (source:row): none of process {self.rank}"
        elif math.isfinite(skipped.loss):
            rows = "rows (source:row): none by itself: the gradient is not finite"
        else:
            rows = "rows (source:row): none by itself: the parameters were not finite before"
        what = "train loss" if not math.isfinite(skipped.loss) else "gradient norm"
        value = skipped.loss if not math.isfinite(skipped.loss) else skipped.grad_norm
        return f"{what} is {value} at step {skipped.step} (learning rate {skipped.lr:.3g}); {rows}"


REMEDY = "lower optim.lr, or look at these rows."


def spike_sentence(step: int, loss: float, *, median: float, window: int, pending: Pending | None) -> str:
    """Format how far a loss jumped, with this process's rows of the largest loss sums."""
    text = f"train loss is {loss:.4f} at step {step}, {loss / max(median, 1e-9):.1f} times the median {median:.4f} "
    text += f"of the {window} steps before"
    if pending is None or pending.output is None:
        return text
    worst = sorted(row_losses(pending), key=lambda each: -each[1])[:4]
    return f"{text}; rows with the largest loss sums (source:row): {rows_text([label for label, _ in worst])}"


def rows_text(rows: Sequence[str]) -> str:
    """Format up to `MAX_ROWS` of the rows, and how many more there are."""
    more = f" and {len(rows) - MAX_ROWS} more" if len(rows) > MAX_ROWS else ""
    return ", ".join(rows[:MAX_ROWS]) + more
