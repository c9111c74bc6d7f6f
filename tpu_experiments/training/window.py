"""Reading the step's reports without stopping the device.

Between two log records the reports stay on the device. At a log step a step closure reads them, in another thread on
XLA, and puts the numbers into an inbox that the loop empties when it passes by.
"""

import math
import queue
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

from tpu_experiments.training.step import StepOutput


class TrainingStopped(RuntimeError):
    """Training cannot continue; the message says where and why."""


@dataclass(frozen=True)
class Mark:
    """Reading of the host's clocks; seconds are relative to some start."""

    seconds: float = 0.0
    trace: float = 0.0
    input_wait: float = 0.0
    compiles: int = 0

    def plus(self, other: "Mark") -> "Mark":
        """Return the sum, clock by clock."""
        return Mark(*(mine + yours for mine, yours in zip(astuple(self), astuple(other), strict=True)))

    def minus(self, other: "Mark") -> "Mark":
        """Return what has passed on each clock since `other`."""
        return Mark(*(mine - yours for mine, yours in zip(astuple(self), astuple(other), strict=True)))


@dataclass
class Pending:
    """One queued step and the host's facts about it."""

    step: int
    lr: float
    labels: list[str]
    """`source:row` of every row of this process, in the order of the row losses."""
    num_tokens: int
    output: StepOutput | None = None
    """Filled when the step is queued."""
    mark: Mark = Mark()
    """When it was queued."""


@dataclass(frozen=True)
class Skipped:
    """A step whose loss or gradient norm was not finite."""

    step: int
    lr: float
    loss: float
    grad_norm: float
    num_tokens: int
    rows: list[str]
    """`source:row` of this process's rows whose own loss is not finite."""


@dataclass
class Reading:
    """Values of one log record."""

    step: int
    lr: float
    losses: list[tuple[int, float]]
    """(step, loss) of every finite step since the record before."""
    grad_norm: float
    num_tokens: int
    time: float
    """Seconds on the monotonic clock when the values arrived."""
    num_supervised: float = 0.0
    mark: Mark = Mark()
    """When the last of its steps was queued."""
    norms: list[list[float]] = field(default_factory=list)
    """Of the last finite step: norms of gradient and update by group; empty where none are computed."""
    skipped: list[Skipped] = field(default_factory=list)
    """Steps that were not finite, so that nothing was updated; they are not among `losses`."""
    steps: list[Pending] = field(default_factory=list)
    """What the losses are of."""
    supervised: list[float] = field(default_factory=list)
    """Supervised tokens of each of the losses; nan of those of an earlier life that did not say."""
    num_carried: int = 0
    """How many of the losses, the first ones, an earlier life of the run computed."""

    @property
    def mean_loss(self) -> float:
        """Return the mean over the finite steps of the record; NaN without any."""
        return sum(loss for _, loss in self.losses) / len(self.losses) if self.losses else math.nan

    @property
    def num_steps(self) -> int:
        """Return the steps since the previous record that this process trained."""
        return len(self.losses) - self.num_carried + len(self.skipped)

    @property
    def first_step(self) -> int:
        """Return the first step of the record."""
        return min(step for step, _ in [*self.losses, *((s.step, s.loss) for s in self.skipped)])


@dataclass
class Window:
    """Steps since the last log record."""

    pending: list[Pending] = field(default_factory=list)
    inbox: "queue.SimpleQueue[Reading]" = field(default_factory=queue.SimpleQueue)
    carried: list[tuple[int, float]] = field(default_factory=list)
    """(step, loss) of the steps since the last record that an earlier life of the run did; the next record has them."""
    carried_supervised: list[float] = field(default_factory=list)
    """Supervised tokens of each of them."""

    def open(self) -> tuple[list[tuple[int, float]], list[float]]:
        """Return (step, loss) of every finite step since the last record, and its supervised tokens.

        Waits for the device. A checkpoint stores both.
        """
        reading = reading_of(self.pending) if self.pending else None
        losses, supervised = (reading.losses, reading.supervised) if reading is not None else ([], [])
        return self.carried + losses, self.carried_supervised + supervised

    def carry(self, losses: Sequence[tuple[int, float]], supervised: Sequence[float]) -> None:
        """Begin the next record with what `open` returned in an earlier life of the run."""
        known = len(supervised) == len(losses)
        self.carried = list(losses)
        self.carried_supervised = list(supervised) if known else [math.nan] * len(losses)

    def close(self) -> list[Pending]:
        """Return the steps collected so far, and start a new record."""
        steps, self.pending = self.pending, []
        return steps

    def read(self, steps: list[Pending]) -> None:
        """Read the reports of `steps` from the device (waits for it) into the inbox."""
        carried, supervised = self.carried, self.carried_supervised
        self.carry([], [])
        self.inbox.put(reading_of(steps, carried=carried, carried_supervised=supervised))

    def unread(self) -> Reading | None:
        """Return the reports of steps without a record yet, which are kept; waits for the device."""
        return reading_of(self.pending) if self.pending else None

    def drain(self) -> list[Reading]:
        """Return the readings that have arrived."""
        readings: list[Reading] = []
        while not self.inbox.empty():
            readings.append(self.inbox.get())
        return readings

    def clear(self) -> None:
        """Drop what is queued and what has arrived."""
        self.close()
        self.drain()
        self.carry([], [])


def reading_of(
    steps: list[Pending], *, carried: Sequence[tuple[int, float]] = (), carried_supervised: Sequence[float] = ()
) -> Reading:
    """Read the reports of `steps` from the device, after the losses `carried` over a resume."""
    losses, each = list(carried), list(carried_supervised)
    skipped: list[Skipped] = []
    supervised, grad_norm = 0.0, math.nan
    finite: StepOutput | None = None
    for pending in steps:
        output = pending.output
        assert output is not None
        loss, norm = float(output.loss.cpu()), float(output.grad_norm.cpu())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            rows = [label for label, value in row_losses(pending) if not math.isfinite(value)]
            skipped.append(Skipped(pending.step, pending.lr, loss, norm, pending.num_tokens, rows))
            continue
        losses.append((pending.step, loss))
        each.append(float(output.num_supervised.cpu()))
        supervised += each[-1]
        grad_norm, finite = norm, output
    last = steps[-1]
    norms = [] if finite is None or finite.norms is None else finite.norms.cpu().tolist()
    tokens = sum(pending.num_tokens for pending in steps)
    arrived = time.perf_counter()
    values = (grad_norm, tokens, arrived, supervised, last.mark, norms, skipped, list(steps), each, len(carried))
    return Reading(last.step, last.lr, losses, *values)


def row_losses(pending: Pending) -> list[tuple[str, float]]:
    """Return `source:row` and loss sum of this process's rows of a step, read from the device."""
    assert pending.output is not None
    values = pending.output.row_losses_AR.cpu().flatten().tolist()
    return list(zip(pending.labels, values, strict=True))
