"""All results of task=plan in one object; report.py, page.py and chart.py only format it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tpu_experiments.config.curriculum import Geometry, Stage
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.identity import job_hash
from tpu_experiments.config.mesh import Mesh, mesh_of
from tpu_experiments.config.schema import Config
from tpu_experiments.metrics.flops import FlopsPerToken
from tpu_experiments.planning.decoding import Decoding
from tpu_experiments.planning.iteration import Iteration
from tpu_experiments.planning.money import Cost, Dollars, RunLength, usd_per_million_tokens
from tpu_experiments.planning.orders import Order
from tpu_experiments.planning.stored_plans import programs_key
from tpu_experiments.planning.timing import Calibration, StepTime, StepWork
from tpu_experiments.planning.work import GIB, MemoryEstimate


@dataclass(frozen=True)
class ChipMemory:
    """HBM of one chip during the largest program, in GiB."""

    arguments: float
    """Weights, optimizer state and batch."""
    temporaries: float
    outputs: float
    """Outputs with buffers of their own; those that reuse the buffers of arguments are not counted again."""
    limit: float
    """GiB that one program may use of the chip."""
    classes: dict[str, float] = field(default_factory=dict)
    """The same memory by what it holds, for example `base weights`; sums to `total` or less."""
    source: str = "compiled"
    """`compiled`: from the TPU's compiler. `analytic`: from formulas."""

    @property
    def total(self) -> float:
        """GiB at the peak."""
        return self.arguments + self.temporaries + self.outputs

    @property
    def headroom(self) -> float:
        """GiB left; negative where it does not fit."""
        return self.limit - self.total


def chip_limit_gib(hw: HwConfig) -> float:
    """Return the GiB of HBM that one program may use; infinite on a CPU."""
    if hw.chip is None:
        return float("inf")
    return hw.chip.program_hbm_gib or hw.chip.hbm_gib


def analytic_chip_memory(estimate: MemoryEstimate, *, hw: HwConfig) -> ChipMemory:
    """Convert the formulas' estimate to the form of the compiler's."""
    classes = {
        "base weights": estimate.base,
        "adapters" if estimate.base else "trained weights": estimate.adapters,
        "optimizer state": estimate.optimizer,
        "batch": estimate.batch,
        "gradients": estimate.gradients,
        "activations": estimate.activations,
        "logits": estimate.logits,
        "gathered weights": estimate.gathered,
    }
    return ChipMemory(
        arguments=estimate.arguments,
        temporaries=estimate.temporaries,
        outputs=0.0,
        limit=chip_limit_gib(hw),
        classes={name: gib for name, gib in classes.items() if gib > 0},
        source=estimate.source,
    )


@dataclass(frozen=True)
class LargeBuffer:
    """One entry of the compiler's out-of-memory report."""

    num_bytes: int
    shape: str
    words: str
    """Its content, in the words of the config."""
    count: int = 1
    """Number of such buffers among those that the compiler lists."""

    @property
    def gib(self) -> float:
        """Size of one in GiB."""
        return self.num_bytes / GIB


@dataclass(frozen=True)
class Shortage:
    """Why the step does not fit."""

    message: str
    """First line of the compiler's own report."""
    used_gib: float
    limit_gib: float
    buffers: tuple[LargeBuffer, ...] = ()
    """Largest first."""
    remedies: tuple[str, ...] = ()
    """Nearest settings that fit, or are likely to, as overrides of the command line."""


@dataclass(frozen=True)
class Program:
    """One compiled program of the run."""

    name: str
    """`train`, `eval` or `sample`."""
    stages: tuple[str, ...]
    """Stages of the curriculum that use it."""
    shape: str
    """Rows and tokens, for example `1 x 8 x 2048`."""
    compile_seconds: float | None
    """Seconds on this machine; null where it was not compiled."""
    total_gib: float | None = None
    """HBM of a chip while it runs, including what else the run keeps resident; null where it was not compiled."""
    estimated_seconds: float | None = None
    """Seconds of one run of it; null where it does not fit or was not compiled."""
    fingerprint: str = ""
    """Hash of the lowered program."""


@dataclass(frozen=True)
class Rung:
    """One try on the ladder of micro-batches."""

    micro_batch: int
    total_gib: float
    """GiB per chip, as reported by the compiler."""
    fits: bool
    predicted_gib: float | None = None
    """Predicted from the headroom of the first try; null for that one."""


@dataclass(frozen=True)
class Tried:
    """One combination of a search."""

    overrides: tuple[str, ...]
    """Settings in the form that the command line takes."""
    outcome: str
    """`fits`; `too large` by the compiler; `pruned` by formulas or since fewer rows were too large; `refused` by the
    checks or the compiler."""
    total_gib: float | None = None
    step_seconds: float | None = None
    """Estimate for the stage that needs the most memory."""
    compile_seconds: float | None = None
    """Seconds to compile the training programs on this machine."""
    reason: str = ""
    """Why it was refused or pruned."""
    iteration: Iteration | None = None
    """An iteration, where rollouts are searched."""

    @property
    def compared_seconds(self) -> float | None:
        """Seconds that a search compares: of a step, or of an answer where rollouts are searched."""
        return self.step_seconds if self.iteration is None else 1 / self.iteration.answers_per_second


@dataclass(frozen=True)
class Comparison:
    """The same run on another machine."""

    hw: str
    chips: int
    fits: bool | None
    """Null where nothing was checked."""
    step_seconds: float | None
    """Null where it does not fit."""
    tokens_per_second: float | None
    """Tokens per second of the whole machine."""
    hours: float | None
    usd: Dollars
    usd_per_million_tokens: Dollars
    method: str
    """`compiled`, `analytic` or `datasheet`."""
    assumption: str = ""
    """Assumption behind a row that was not compiled."""


@dataclass(frozen=True)
class Plan:
    """One config planned for one machine; the step is that of the stage that needs the most memory."""

    name: str
    job: str
    """Hash of what is trained, whatever the machine and the way of computing: plans of one job are comparable."""
    programs_key: str
    """Hash of what its programs depend on: a run with the same one compiles the same programs."""
    model: str
    data: tuple[str, ...]
    hw: HwConfig
    sharding: str
    global_batch: int
    """Rows of one optimizer step over all chips."""
    micro_batch: int
    """Rows of one chip that pass through the model at once."""
    seq_len: int
    fits: bool
    memory: ChipMemory
    """Memory of the largest program."""
    flops: FlopsPerToken
    calibration: Calibration
    method: str = "compiled"
    """`compiled`: by the TPU's compiler. `analytic`: without libtpu, from formulas."""
    largest_program: str = "train"
    """The program that `memory` is of."""
    shortage: Shortage | None = None
    programs: tuple[Program, ...] = ()
    work: StepWork | None = None
    cycles_by_class: dict[str, int] = field(default_factory=dict)
    time: StepTime | None = None
    """Null where the step does not fit or nothing compiled it."""
    seconds_by_part: dict[str, float] = field(default_factory=dict)
    """Seconds of the step by what the work is for (parts.PARTS), before the calibration; empty where it was not
    compiled."""
    run: RunLength | None = None
    cost: Cost | None = None
    ladder: tuple[Rung, ...] = ()
    orders: tuple[Order, ...] = ()
    """Other orders of the chips that the training step was compiled for (task.orders)."""
    search: tuple[Tried, ...] = ()
    """Every combination of a search, the best first."""
    comparisons: tuple[Comparison, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    """Flags of libtpu that it was compiled with, which a run has as well; empty where it was not compiled."""
    notes: tuple[str, ...] = ()
    sharing_rows: int = 1
    """Number of chips that work on the same rows (sharding.mesh.tensor)."""
    decoding: Decoding | None = None
    """Answers that are written beside training (task.decode.rows, or a rollout); null where none were planned."""
    iteration: Iteration | None = None
    """An iteration of a run on its own answers; null of other runs, and where it is not planned."""

    @property
    def accumulation(self) -> int:
        """Number of micro-batches in one optimizer step."""
        return self.global_batch // (self.micro_batch * self.hw.num_devices // self.sharing_rows)

    @property
    def compile_seconds(self) -> float | None:
        """Seconds to compile all programs on this machine; null where none was compiled."""
        known = [p.compile_seconds for p in self.programs if p.compile_seconds is not None]
        return sum(known) if known else None

    @property
    def usd_per_million_tokens(self) -> Dollars:
        """Dollars per million tokens in steady state."""
        return usd_per_million_tokens(self.time, price=self.hw.price) if self.time else Dollars(None, None)

    def as_comparison(self) -> Comparison:
        """Return this plan as a row of a comparison."""
        time = self.time
        return Comparison(
            hw=self.hw.name,
            chips=self.hw.num_devices,
            fits=self.fits,
            step_seconds=time.total_s if time else None,
            tokens_per_second=time.tokens_per_second_per_chip * self.hw.num_devices if time else None,
            hours=self.cost.hours if self.cost else None,
            usd=self.cost.usd if self.cost else Dollars(None, None),
            usd_per_million_tokens=self.usd_per_million_tokens,
            method=self.method,
        )


def plan_of(config: Config, arch: Any, stages: Sequence[Stage], *, geometry: Geometry, **found: Any) -> Plan:
    """Build a plan from a config and the results.

    Args:
        geometry: batch of the stage that needs the most memory.
        found: the remaining fields.
    """
    mesh = mesh_of(config.hw, config.sharding)
    return Plan(
        name=str(config.name),
        job=job_hash(config),
        programs_key=programs_key(config, arch, stages),
        model=config.model.name,
        data=tuple(config.data),
        hw=config.hw,
        sharding=named_sharding(config, mesh=mesh),
        sharing_rows=mesh.tensor,
        global_batch=geometry.global_rows,
        micro_batch=geometry.micro_rows,
        seq_len=geometry.seq_len,
        **found,
    )


def named_sharding(config: Config, *, mesh: Mesh) -> str:
    """Return the sharding table's name, with the sizes of a mesh that has more than the one axis."""
    if config.hw.parallel != "spmd":
        return "replicated"
    sizes = ", ".join(f"{axis}={mesh.size(axis)}" for axis in mesh.names)
    return config.sharding.name if mesh.names == ("fsdp",) else f"{config.sharding.name} ({sizes})"
