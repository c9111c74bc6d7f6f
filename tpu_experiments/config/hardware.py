"""Schema of the `hw` group: the machine, how its chips are used, what it costs.

Nothing outside conf/hw/*.yaml names a TPU generation. A hardware choice never changes the mathematics:
batches are global, and micro-batch and accumulation are derived from it.
"""

from dataclasses import dataclass, field

from omegaconf import MISSING

from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.places import place


@dataclass
class ChipConfig:
    """Datasheet of one chip."""

    name: str = MISSING
    """Name as Google writes it, for example `v6e`."""
    hbm_gib: float = number(above=0)
    """High-bandwidth memory per chip in GiB."""
    program_hbm_gib: float | None = number(default=None, above=0)
    """What of `hbm_gib` one program may take, in GiB, from the compiler's out-of-memory message; null is all of it."""
    peak_tflops_bf16: float = number(above=0)
    """Peak dense bf16 TFLOP/s per chip."""
    hbm_gb_per_second: float = number(above=0)
    """Memory bandwidth per chip in GB/s (10^9)."""
    ici_gb_per_second: float = number(at_least=0)
    """Inter-chip bandwidth per chip, both directions together, in GB/s; 0 where there is none."""
    clock_ghz: float = number(above=0)
    """Clock at which the datasheet's peak holds (an assumption, not measured)."""
    source: str = MISSING
    """Where the figures come from, with date."""


@dataclass
class PriceConfig:
    """Price of one chip-hour; override it with your region's."""

    usd_per_chip_hour_on_demand: float = number(at_least=0)
    """US dollars per chip and hour, on demand."""
    usd_per_chip_hour_spot: float | None = number(at_least=0)
    """US dollars per chip and hour, spot; moves monthly; null where no dated price is known."""
    on_demand_range: list[float] = field(default_factory=list)
    """Lowest and highest on-demand price of all regions at the date; empty where unknown."""
    spot_range: list[float] = field(default_factory=list)
    """Lowest and highest spot price of all regions at the date; empty where unknown."""
    region: str = MISSING
    """Region the two prices hold for."""
    date: str = MISSING
    """Date of the price list, ISO 8601."""
    source: str = MISSING
    """Where the prices come from."""


@dataclass
class RentConfig:
    """Resources that launch/tpu.py requests from Google Cloud; a run itself reads none of it."""

    accelerator_type: str = MISSING
    """The slice as the Cloud TPU API names it, for example `v5litepod-8`."""
    runtime_version: str = MISSING
    """Image of the VMs; it has to fit the chip."""
    chips_per_host: int = number(at_least=1)
    """Chips of one VM; a slice of more has several VMs."""
    zones: list[str] = field(default_factory=list)
    """Zones that offer the slice, tried in this order."""
    disk_type: str = MISSING
    """Kind of disk that several such VMs may read at once."""
    source: str = MISSING
    """Where this comes from, with date."""


@dataclass
class CalibrationConfig:
    """Correction of a chip generation's planned time by measurements on it."""

    factor: float = number(above=0)
    """Measured step seconds divided by planned ones; the plan multiplies by it."""
    relative_error: float | None = number(default=None, at_least=0, below=1)
    """Largest relative deviation after the factor, over the measurements it comes from; null where unknown."""
    kernel_share_of_peak: float = number(default=0.4, above=0, at_most=1)
    """Share of peak FLOP/s that Pallas kernels are assumed to reach; their time is not in the compiler's estimate."""
    source: str = MISSING
    """The measurements, with their address and date."""


@dataclass
class HwConfig:
    """One machine, and how its chips are used."""

    name: str = MISSING
    """Name of the machine; the file name in conf/hw."""
    device: str = choice("cpu", "tpu", "cuda")
    """Kind of device the arithmetic runs on."""
    runtime: str = choice("xla", "eager")
    """`xla`: torch_xla. `eager`: plain torch (cpu or cuda), the reference the xla runtime is tested against."""
    parallel: str = choice("inline", "spmd", "spawn")
    """`inline`: one device in this process. `spmd`: one process per host, arrays sharded over the mesh.
    `spawn`: one process per device, replicated, gradients summed in the graph."""
    num_devices: int = number(at_least=1)
    """Devices that take part, over all processes and hosts."""
    num_hosts: int = number(default=1, at_least=1)
    """Machines of the slice; with more than one the same command runs on each of them, in one process (spmd)."""
    topology: str | None = None
    """The slice as libtpu names it, for example `v6e:2x4`; what task=plan compiles for. Null where there is no TPU."""
    chip: ChipConfig | None = None
    """Datasheet of the chip; null on a CPU."""
    price: PriceConfig | None = None
    """Price of a chip-hour; null where nothing is rented."""
    rent: RentConfig | None = None
    """How launch/tpu.py rents it; null where it does not."""
    calibration: CalibrationConfig | None = None
    """Correction of planned times; null applies none."""
    libtpu_flags: list[str] = field(default_factory=list)
    """Put into LIBTPU_INIT_ARGS before torch_xla is imported; libtpu aborts on a flag it does not know."""
    env: dict[str, str] = field(default_factory=dict)
    """Further environment variables, set before torch_xla is imported."""
    compile_cache: str = place("local", default="auto")
    """Local folder of compiled programs that later processes load instead of compiling; `none` keeps none. `auto`:
    `<output_dir>/compile_cache` on a TPU, none elsewhere: torch_xla 2.9's CPU device cannot read what it wrote."""
    attention_block: int = number(default=1024, at_least=128)
    """Tokens in the largest block of queries and of keys of the attention kernel, a multiple of 128: what fits into the
    chip's VMEM. Shorter rows are one block."""
    num_threads: int | None = number(default=None, at_least=1)
    """CPU threads of one process of the eager runtime; null shares the usable cores among the processes."""
