"""Throughput, host time and utilisation of training steps, measured without stopping the device.

Between two log records the step reports stay on the device. At a log step, a step closure (on XLA, in another thread)
reads them and puts the values into an inbox, which the loop empties between steps.

A step's host time has three parts. `trace`: Python traces the program, or reuses the previous graph, and dispatches it.
`input_wait`: the loop waits for a batch. `rest`: it waits for the device, or does something else; a busy device shows
as a large rest. An interval between two log records that includes a compilation is not counted.
"""

import logging
import math
import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields, replace
from typing import TypeVar

from torch import Tensor

from tpu_experiments.config.curriculum import Geometry
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.metrics.flops import FlopsPerToken, utilisation
from tpu_experiments.optim.loss_scale import LEAST
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.runtime.host_copies import on_host
from tpu_experiments.training.step import StepOutput

# ---- step reports -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """Reading of the host's clocks, in seconds from an arbitrary origin, and the number of compilations."""

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
    """Report on the device, set when the step is queued."""
    mark: Mark = Mark()
    """Host clocks when the step was queued."""
    examples: tuple[int, int] | None = None
    """`StepInfo.examples`."""


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
    loss_scale: float | None = None
    """Factor of the loss; None outside float16."""

    @property
    def has_overflowed(self) -> bool:
        """Return whether gradients were too large for float16 only because of the loss scale."""
        return self.loss_scale is not None and self.loss_scale > LEAST and math.isfinite(self.loss)


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
    """Host clocks when the last of the steps was queued."""
    norms: list[list[float]] = field(default_factory=list)
    """Norms of gradient and update by group, of the last finite step; empty if not computed."""
    skipped: list[Skipped] = field(default_factory=list)
    """Steps that were not finite and updated nothing; they are not among `losses`."""
    steps: list[Pending] = field(default_factory=list)
    """Steps that this process trained, skipped ones included."""
    supervised: list[float] = field(default_factory=list)
    """Supervised tokens of each entry of `losses`; NaN for steps of an earlier process that did not record them."""
    num_carried: int = 0
    """Number of leading entries of `losses` that an earlier process of the run computed."""
    loss_scale: float | None = None
    """Factor of the last step's loss; None outside float16."""
    reported: list[list[float]] = field(default_factory=list)
    """Sums that the objective reports, of each entry of `losses`; empty if it reports none, or a step is not known."""
    shares: list[list[float]] = field(default_factory=list)
    """Shares of the codes -1, 0 and 1 by layer, of the last finite step; empty if not computed."""
    num_examples: int = 0
    """Pairs or single answers of the finite steps; 0 where tokens alone are counted."""

    @property
    def mean_loss(self) -> float:
        """Return the mean over the finite steps of the record; NaN without any."""
        return sum(loss for _, loss in self.losses) / len(self.losses) if self.losses else math.nan

    @property
    def reported_sums(self) -> list[float]:
        """Return the sums of `reported` over the steps; empty if they are not known."""
        return [sum(column) for column in zip(*self.reported, strict=True)]

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
    """(step, loss) of steps since the last record that an earlier process trained; the next record includes them."""
    carried_supervised: list[float] = field(default_factory=list)
    """Supervised tokens of each of them."""
    carried_reported: list[list[float]] = field(default_factory=list)
    """What the objective reports of each of them; empty where that is not known."""

    def open(self) -> tuple[list[tuple[int, float]], list[float], list[list[float]]]:
        """Return (step, loss) of every finite step since the last record, its supervised tokens, and what is reported.

        Waits for the device. A checkpoint stores all three.
        """
        if not self.pending:
            return self.carried, self.carried_supervised, self.carried_reported
        reading = self._read(self.pending)
        return reading.losses, reading.supervised, reading.reported

    def carry(
        self,
        losses: Sequence[tuple[int, float]],
        supervised: Sequence[float],
        reported: Sequence[Sequence[float]] = (),
    ) -> None:
        """Begin the next record with the values that `open` returned in an earlier process of the run."""
        known = len(supervised) == len(losses)
        self.carried = list(losses)
        self.carried_supervised = list(supervised) if known else [math.nan] * len(losses)
        self.carried_reported = [list(each) for each in reported]

    def _read(self, steps: list[Pending]) -> Reading:
        return read_reports(
            steps,
            carried=self.carried,
            carried_supervised=self.carried_supervised,
            carried_reported=self.carried_reported,
        )

    def close(self) -> list[Pending]:
        """Return the steps collected so far, and start a new record."""
        steps, self.pending = self.pending, []
        return steps

    def read(self, steps: list[Pending]) -> None:
        """Read the reports of `steps` from the device (waits for it) into the inbox."""
        reading = self._read(steps)
        self.carry([], [])
        self.inbox.put(reading)

    def unread(self) -> Reading | None:
        """Return the reports of steps without a record yet, which are kept; waits for the device."""
        return read_reports(self.pending) if self.pending else None

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


def read_reports(
    steps: list[Pending],
    *,
    carried: Sequence[tuple[int, float]] = (),
    carried_supervised: Sequence[float] = (),
    carried_reported: Sequence[list[float]] = (),
) -> Reading:
    """Read the reports of `steps` from the device, after the losses `carried` over a resume."""
    losses, each = list(carried), list(carried_supervised)
    skipped: list[Skipped] = []
    supervised, examples, grad_norm = 0.0, 0, math.nan
    reported = list(carried_reported)
    finite: StepOutput | None = None
    for pending in steps:
        output = pending.output
        assert output is not None
        loss, norm = float(on_host(output.loss)), float(on_host(output.grad_norm))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            rows = [label for label, value in row_losses(pending) if not math.isfinite(value)]
            scale = _value(output.loss_scale)
            skipped.append(Skipped(pending.step, pending.lr, loss, norm, pending.num_tokens, rows, scale))
            continue
        losses.append((pending.step, loss))
        each.append(float(on_host(output.num_supervised)))
        supervised += each[-1] if pending.examples is None else pending.examples[0]
        examples += 0 if pending.examples is None else pending.examples[1]
        if output.reported is not None:
            reported.append(on_host(output.reported).tolist())
        grad_norm, finite = norm, output
    last = steps[-1]
    norms = [] if finite is None or finite.norms is None else on_host(finite.norms).tolist()
    tokens = sum(pending.num_tokens for pending in steps)
    arrived = time.perf_counter()
    values = (grad_norm, tokens, arrived, supervised, last.mark, norms, skipped, list(steps), each, len(carried))
    assert last.output is not None
    shares = [] if finite is None or finite.shares is None else on_host(finite.shares).tolist()
    scale = _value(last.output.loss_scale)
    known = reported if len(reported) == len(losses) else []
    return Reading(last.step, last.lr, losses, *values, scale, known, shares, examples)


def _value(tensor: Tensor | None) -> float | None:
    return None if tensor is None else float(on_host(tensor))


def row_losses(pending: Pending) -> list[tuple[str, float]]:
    """Return `source:row` and loss sum of this process's rows of a step, read from the device."""
    assert pending.output is not None
    values = on_host(pending.output.row_losses_AR).flatten().tolist()
    return list(zip(pending.labels, values, strict=True))


# ---- meters -------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)
Item = TypeVar("Item")
TRACING_BOUND, INPUT_BOUND = 0.8, 0.1
"""Shares of the step time above which tracing (which runs in parallel with the device) and input wait are warned of."""
RATES = (
    "tokens_per_second", "supervised_tokens_per_second", "step_seconds", "trace_seconds", "input_wait_seconds",
    "rest_seconds", "mfu", "hfu",
)  # fmt: skip
STEADY_STEPS = 10
"""Measured steps before the first such warning."""


@dataclass
class Totals:
    """Sums over measured intervals."""

    steps: int = 0
    seconds: float = 0.0
    trace: float = 0.0
    input_wait: float = 0.0
    tokens: int = 0
    supervised: float = 0.0
    model_flops: float = 0.0
    executed_flops: float = 0.0
    examples: int = 0

    def add(self, other: "Totals") -> None:
        """Add the sums of another interval to these."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass
class Meters:
    """Throughput, host time and utilisation of one process's run."""

    runtime: Runtime
    hw: HwConfig
    flops: Mapping[int, FlopsPerToken]
    """FLOPs per token by row length; empty for a model whose FLOPs are not counted."""
    totals: Totals = field(default_factory=Totals)
    """Sums over the measured intervals of this process."""
    examples: str | None = None
    """What is counted beside tokens (`ObjectiveConfig.examples`)."""

    def __post_init__(self) -> None:
        self._input_wait = 0.0
        self._excluded = Mark()
        self._last = Mark()
        self._geometry: Geometry | None = None
        self._warned: set[str] = set()

    def begin(self, geometry: Geometry) -> None:
        """Start measuring the steps of a stage."""
        self._geometry, self._last = geometry, self.mark()

    def timed(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Yield the same batches, counting the time waited for each as input wait.

        The end is no batch: a feed ends once the device has computed what it was fed.
        """
        while True:
            started = time.perf_counter()
            item = next(batches, None)
            if item is None:
                return
            self._input_wait += time.perf_counter() - started
            yield item

    @property
    def input_wait_seconds(self) -> float:
        """Return the seconds waited for batches so far, including intervals with compilations."""
        return self._input_wait

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude the block from the steps' time; all readings before it must have been taken."""
        before = self._now()
        try:
            yield
        finally:
            self._excluded = self._excluded.plus(self._now().minus(before))

    def mark(self) -> Mark:
        """Return the current time on the clock of the steps, which stops inside `excluded`."""
        return self._now().minus(self._excluded)

    def _now(self) -> Mark:
        counters = self.runtime.counters()
        trace = counters.trace_seconds + counters.dispatch_seconds
        return Mark(time.perf_counter(), trace, self._input_wait, counters.num_compiles)

    def values(self, reading: Reading) -> dict[str, float]:
        """Return the meters of one log record by name.

        Empty where its interval includes a compilation; values unknown to hardware or model are left out.
        """
        # The values arrived when the device had finished; the other clocks were read when the last step was queued.
        end = replace(reading.mark, seconds=reading.time - self._excluded.seconds)
        span, compiles = end.minus(self._last), self.mark().compiles - self._last.compiles
        self._last = end
        if compiles or span.seconds <= 0:
            return {}
        part = self._part(reading, span)
        self.totals.add(part)
        self._warn()
        return {f"perf/{name}": value for name, value in self._rates(part).items()} | self._memory()

    def means(self) -> dict[str, float | None]:
        """Return the meters (`RATES`) over all measured steps, with None for unknown values."""
        known = self._rates(self.totals) if self.totals.steps else {}
        names = (*RATES, *([] if self.examples is None else [f"{self.examples}_per_second"]))
        return {"measured_steps": float(self.totals.steps)} | {name: known.get(name) for name in names}

    def _part(self, reading: Reading, span: Mark) -> Totals:
        steps, geometry = reading.num_steps, self._geometry
        assert geometry is not None, "a stage has begun"
        part = Totals(steps, span.seconds, span.trace, span.input_wait, reading.num_tokens, reading.num_supervised)
        part.examples = reading.num_examples
        flops = self.flops.get(geometry.seq_len)
        if flops is not None:
            part.model_flops = flops.model * reading.num_tokens
            part.executed_flops = flops.total * steps * geometry.global_rows * geometry.seq_len
        return part

    def _rates(self, part: Totals) -> dict[str, float]:
        """Return rates per second and per step; utilisation as defined in metrics/flops.py."""
        # The host runs ahead of the device, so it may have traced during an earlier interval: cap at the interval.
        input_wait = min(part.input_wait, part.seconds)
        trace = min(part.trace, part.seconds - input_wait)
        rates = {
            "tokens_per_second": part.tokens / part.seconds,
            "supervised_tokens_per_second": part.supervised / part.seconds,
            "step_seconds": part.seconds / part.steps,
            "trace_seconds": trace / part.steps,
            "input_wait_seconds": input_wait / part.steps,
            "rest_seconds": (part.seconds - trace - input_wait) / part.steps,
        }
        if self.examples is not None:
            rates[f"{self.examples}_per_second"] = part.examples / part.seconds
        if self.hw.chip is not None and part.model_flops:
            settings = {"seconds": part.seconds, "peak_tflops": self.hw.chip.peak_tflops_bf16}
            rates["mfu"] = utilisation(part.model_flops, **settings, num_devices=self.hw.num_devices)
            rates["hfu"] = utilisation(part.executed_flops, **settings, num_devices=self.hw.num_devices)
        return rates

    def _memory(self) -> dict[str, float]:
        """Return the GiB in use and at peak, where the device reports them."""
        values = {"perf/hbm_gib": self.runtime.memory_gib(), "perf/hbm_peak_gib": self.runtime.peak_memory_gib()}
        return {name: value for name, value in values.items() if value is not None}

    def _warn(self) -> None:
        """Warn once for each cause that keeps the device waiting."""
        total = self.totals
        if total.steps < STEADY_STEPS or self.runtime.rank != 0:
            return
        each = {name: getattr(total, name) / total.steps for name in ("seconds", "trace", "input_wait")}
        if each["trace"] > TRACING_BOUND * each["seconds"] and "trace" not in self._warned:
            self._warned.add("trace")
            log.warning(
                "tracing-bound: a step takes %.3f s, the host traces for %.3f s of it, and the device waits; "
                "model.stack=scanned traces one layer for all, more rows per step (trainer.global_batch_rows) take no "
                "longer to trace, and trainer.trace_every_steps=200 replays most steps of this project's own trainers",
                each["seconds"],
                each["trace"],
            )
        if each["input_wait"] > INPUT_BOUND * each["seconds"] and "input" not in self._warned:
            self._warned.add("input")
            log.warning(
                "input-bound: a step takes %.3f s, and the loop waits %.3f s of it for a batch; try "
                "loader.loader_prefetch_size or loader.host_to_device_transfer_threads, and prepared data on a "
                "local disk",
                each["seconds"],
                each["input_wait"],
            )
