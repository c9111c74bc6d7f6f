"""Schema of the group `hw`: the machine, how its chips are used, and what it costs.

Only conf/hw/*.yaml names TPU generations. The hardware never changes the mathematics of training: batches are global,
and the micro-batch and its accumulation are derived from the hardware.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from omegaconf import MISSING

from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.places import place


@dataclass
class ChipConfig:
    """Datasheet of one chip."""

    name: str = MISSING
    """Name as its maker writes it, for example `v6e`."""
    hbm_gib: float = number(above=0)
    """High-bandwidth memory per chip in GiB."""
    program_hbm_gib: float | None = number(default=None, above=0)
    """Part of `hbm_gib` that one program may use, in GiB, from the compiler's out-of-memory message; null is all."""
    vmem_mib: int | None = number(default=None, above=0)
    """Vector memory of a TPU's core in MiB, from the compiler's message; null where it is not known, or not a TPU."""
    peak_tflops_bf16: float = number(above=0)
    """Peak dense bf16 TFLOP/s per chip; of a chip without bf16, such as the T4, that of float16."""
    hbm_gb_per_second: float = number(above=0)
    """Memory bandwidth per chip in GB/s (10^9)."""
    ici_gb_per_second: float = number(at_least=0)
    """Inter-chip bandwidth per chip in GB/s, sum of both directions; 0 without interconnect."""
    clock_ghz: float = number(above=0)
    """Clock at which the datasheet's peak holds (an assumption, not measured)."""
    source: str = MISSING
    """Source of the figures, with date."""


@dataclass
class PriceConfig:
    """Price of one chip-hour; override it with that of your region."""

    usd_per_chip_hour_on_demand: float = number(at_least=0)
    """On-demand price in US dollars per chip-hour."""
    usd_per_chip_hour_spot: float | None = number(at_least=0)
    """Spot price in US dollars per chip-hour, which changes monthly; null if no dated price is known."""
    on_demand_range: list[float] = field(default_factory=list)
    """Lowest and highest on-demand price over all regions at `date`; empty if unknown."""
    spot_range: list[float] = field(default_factory=list)
    """Lowest and highest spot price over all regions at `date`; empty if unknown."""
    region: str = MISSING
    """Region of the two prices."""
    date: str = MISSING
    """Date of the price list, ISO 8601."""
    source: str = MISSING
    """Source of the prices."""


@dataclass
class RentConfig:
    """Resources that launch/tpu.py requests from Google Cloud; a run itself reads none of it."""

    accelerator_type: str = MISSING
    """The slice as the Cloud TPU API names it, for example `v5litepod-8`."""
    runtime_version: str = MISSING
    """VM image, which must support the chip."""
    chips_per_host: int = number(at_least=1)
    """Chips per VM; a larger slice has several VMs."""
    zones: list[str] = field(default_factory=list)
    """Zones that offer the slice, tried in this order."""
    disk_type: str = MISSING
    """Type of disk that several such VMs can read at the same time."""
    source: str = MISSING
    """Source of these values, with date."""


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
    """The measurements, with URL and date."""


ALWAYS = ("--xla_tpu_enable_deduplicated_calls=true",)
"""Flags of every TPU: code that layers share is in the program once. libtpu decides so itself for some large programs:
an unrolled step of Mistral 7B for v6e-8 then compiles in 4.7 GB, and in more than 23 GB where it does not. Gemma 3
270M's for Colab has 34 instead of 268 MB of code."""
LIBTPU_INIT_ARGS = "LIBTPU_INIT_ARGS"
OF_TORCH_XLA = {
    "xla_tpu_use_enhanced_launch_barrier": "false",
    "xla_latency_hiding_scheduler_rerun": "1",
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_tpu_enable_flash_attention": "false",
}
"""Flags that torch_xla 2.8 and 2.9 add to LIBTPU_INIT_ARGS at import, on a machine whose PCI bus has a TPU
(`_setup_libtpu_flags`)."""
OF_TORCH_XLA_V5 = {"xla_enable_async_all_gather": "true", "xla_enable_async_collective_permute": "true"}
"""Those that it adds on v5e and v5p as well."""
OF_TORCHTPU = {"xla_tpu_use_enhanced_launch_barrier": "false"}
"""jax adds this flag as `true` at import, on a machine with a TPU, and torch_tpu 0.2.0 rewrites that to `false`."""


@dataclass
class HwConfig:
    """One machine, and how its chips are used."""

    name: str = MISSING
    """Name of the machine; the file name in conf/hw."""
    device: str = choice("cpu", "tpu", "cuda")
    """Kind of device the arithmetic runs on."""
    runtime: str = choice("xla", "torchtpu", "eager")
    """`xla`: torch_xla. `torchtpu`: its successor, in an environment of its own; on a TPU it has never run. `eager`:
    plain torch (cpu or cuda), the reference the other two are tested against."""
    parallel: str = choice("inline", "spmd", "spawn")
    """`inline`: one device in this process. `spmd`: one process per host, arrays sharded over the mesh.
    `spawn`: one process per device, replicated, gradients summed in the graph."""
    num_devices: int = number(at_least=1)
    """Number of devices used, over all processes and hosts."""
    num_hosts: int = number(default=1, at_least=1)
    """Machines of the slice; with several, the same command must run on each of them, as one process (spmd)."""
    topology: str | None = None
    """The slice as libtpu names it, for example `v6e:2x4`, for which task=plan compiles; null without a TPU."""
    chip: ChipConfig | None = None
    """Datasheet of the chip; null on a CPU."""
    price: PriceConfig | None = None
    """Price of a chip-hour; null if the machine is not rented."""
    rent: RentConfig | None = None
    """Request with which launch/tpu.py rents the machine; null if it cannot."""
    calibration: CalibrationConfig | None = None
    """Correction of planned times; null applies none."""
    fusion_memory_mib: int | None = number(default=None, at_least=1, at_most=128)
    """Vector memory of a TPU, in MiB, that one operation may use (`--xla_tpu_scoped_vmem_limit_kib`). More gives larger
    tiles; what is left of 128 MiB (v5e and v6e) holds tensors from one operation to the next. null leaves it to the
    compiler, which takes 16. Without a TPU it has no effect."""
    libtpu_flags: list[str] = field(default_factory=list)
    """Flags added to LIBTPU_INIT_ARGS before torch_xla is imported; libtpu aborts on an unknown flag. They follow
    `--xla_tpu_enable_deduplicated_calls=true`, which may be turned off here, and that of `fusion_memory_mib`. Flags
    that torch_xla adds on a TPU come last, and only where none of the name is set."""
    env: dict[str, str] = field(default_factory=dict)
    """Further environment variables, set before torch_xla is imported."""
    compile_cache: str = place("local", default="auto")
    """Local folder of compiled programs, which the next start loads; by torchtpu, task=plan fills it for the first.
    `none` keeps none. `auto` keeps those that runtime=torchtpu compiles for a TPU, in ~/.cache, and none of xla:
    torch_xla 2.9.0 can write them and read none back, on a CPU or a TPU (github.com/pytorch/xla/issues/9094); there a
    folder is for a torch_xla that can."""
    attention_block: int = number(default=1024, at_least=128)
    """Largest block of queries and of keys in the attention kernel, in tokens; a multiple of 128 that fits into the
    chip's VMEM. Shorter rows are one block."""
    cuda_graphs: bool = True
    """Record each program of one NVIDIA GPU as a CUDA graph, which the driver starts as one; false starts each
    operation from Python. Several GPUs and `model.remat=offload` are not recorded."""
    num_threads: int | None = number(default=None, at_least=1)
    """CPU threads per process of the eager runtime; null takes OMP_NUM_THREADS, and where that is not set,
    divides the usable cores among the processes."""


def flags_of(hw: HwConfig, *, exported: str = "") -> list[str]:
    """Return the flags that libtpu has in a run on this hardware; of two of one name the last counts.

    A plan compiles with them, and a run sets them before torch_xla is imported, which then has nothing to add.

    Args:
        exported: LIBTPU_INIT_ARGS of the user; `hw.env` may replace it.
    """
    if hw.device != "tpu":
        return [*exported.split(), *hw.libtpu_flags]
    memory = hw.fusion_memory_mib
    limit = [] if memory is None else [f"--xla_tpu_scoped_vmem_limit_kib={memory * 1024}"]
    given = [*exported.split(), *ALWAYS, *limit, *hw.libtpu_flags]
    if LIBTPU_INIT_ARGS in hw.env:
        given = hw.env[LIBTPU_INIT_ARGS].split()
    named = values_of(given)
    return [*given, *(f"--{name}={value}" for name, value in added_by_runtime(hw).items() if name not in named)]


def added_by_runtime(hw: HwConfig) -> dict[str, str]:
    """Return the flags that the runtime adds on a TPU of this generation, where nobody has set one of the name."""
    if hw.runtime == "torchtpu":
        return OF_TORCHTPU
    generation = re.match(r"v(\d)", hw.topology or (hw.chip.name if hw.chip else ""))
    return OF_TORCH_XLA | (OF_TORCH_XLA_V5 if generation and generation[1] == "5" else {})


def values_of(flags: Iterable[str]) -> dict[str, str]:
    """Return the value of each flag by its name; a flag without one is `true`."""
    pairs = (flag.removeprefix("--").partition("=") for flag in flags)
    return {name: value if equals else "true" for name, equals, value in pairs}
