"""Reading the step's reports without stopping the device.

Between two log records the reports stay on the device. At a log step a step closure reads them, in another thread on
XLA, and puts the numbers into an inbox that the loop empties when it passes by.
"""

import math
import queue
import time
from dataclasses import astuple, dataclass, field

from tpu_experiments.training.step import StepOutput


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says where and why."""


@dataclass(frozen=True)
class Mark:
    """A moment on the clocks of the host; seconds are since some start."""

    seconds: float = 0.0
    trace: float = 0.0
    input_wait: float = 0.0
    compiles: int = 0

    def plus(self, other: "Mark") -> "Mark":
        """Each clock and the other's added."""
        return Mark(*(mine + yours for mine, yours in zip(astuple(self), astuple(other), strict=True)))

    def minus(self, other: "Mark") -> "Mark":
        """What has passed on each clock since `other`."""
        return Mark(*(mine - yours for mine, yours in zip(astuple(self), astuple(other), strict=True)))


@dataclass
class Pending:
    """One queued step and what the host knows about it."""

    step: int
    lr: float
    labels: list[str]
    """`source:row` of every row of this process, in the order of the row losses."""
    num_tokens: int
    output: StepOutput | None = None
    """Filled when the step is queued."""
    mark: Mark = Mark()
    """When it was queued."""


@dataclass
class Reading:
    """One log record."""

    step: int
    lr: float
    losses: list[tuple[int, float]]
    """(step, loss) of every step since the record before."""
    grad_norm: float
    num_tokens: int
    time: float
    """Seconds on the monotonic clock when the values arrived."""
    num_supervised: float = 0.0
    mark: Mark = Mark()
    """When the last of its steps was queued."""
    norms: list[list[float]] = field(default_factory=list)
    """Of the last step: norms of gradient and update by group; empty where none are computed."""

    @property
    def mean_loss(self) -> float:
        """Mean over the steps of the record."""
        return sum(loss for _, loss in self.losses) / len(self.losses)


@dataclass
class Window:
    """The steps since the last log record."""

    pending: list[Pending] = field(default_factory=list)
    inbox: "queue.SimpleQueue[Reading | TrainingStopped]" = field(default_factory=queue.SimpleQueue)

    def close(self) -> list[Pending]:
        """Hand over the steps collected so far."""
        steps, self.pending = self.pending, []
        return steps

    def read(self, steps: list[Pending]) -> None:
        """Move the reports of `steps` to the host (waits for the device) into the inbox."""
        losses, supervised = [], 0.0
        for pending in steps:
            assert pending.output is not None
            loss = float(pending.output.loss.cpu())
            if not math.isfinite(loss):
                self.inbox.put(_non_finite(pending, loss, pending.output))
                return
            losses.append((pending.step, loss))
            supervised += float(pending.output.num_supervised.cpu())
        last = steps[-1]
        assert last.output is not None
        norm = float(last.output.grad_norm.cpu())
        tokens = sum(pending.num_tokens for pending in steps)
        norms = [] if last.output.norms is None else last.output.norms.cpu().tolist()
        arrived = time.perf_counter()
        self.inbox.put(Reading(last.step, last.lr, losses, norm, tokens, arrived, supervised, last.mark, norms))

    def drain(self) -> list[Reading]:
        """The readings that have arrived.

        Raises:
            TrainingStopped: a loss was not finite.
        """
        readings: list[Reading] = []
        while not self.inbox.empty():
            item = self.inbox.get()
            if isinstance(item, TrainingStopped):
                raise item
            readings.append(item)
        return readings


def _non_finite(pending: Pending, loss: float, output: StepOutput) -> TrainingStopped:
    values = output.row_losses_AR.cpu().flatten().tolist()
    bad = [label for label, value in zip(pending.labels, values, strict=True) if not math.isfinite(value)]
    rows = ", ".join(bad[:16]) or "none by itself: the parameters were not finite before"
    return TrainingStopped(
        f"train loss is {loss} at step {pending.step} (learning rate {pending.lr:.3g}); rows (source:row): {rows}; "
        "the last checkpoint is from before; lower optim.lr, or look at these rows."
    )
