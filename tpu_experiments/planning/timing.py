"""Seconds of a step from its cycles, kernels and collectives: an estimate, with its calibration.

Time on the chip is the TPU compiler's own `estimated_cycles` at the datasheet's clock, plus Pallas kernels, which have
no estimate, as FLOPs or bytes, whichever takes longer. Overlapped collectives are hidden by it as far as it lasts.
"""

from dataclasses import dataclass

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import ChipConfig, HwConfig
from tpu_experiments.metrics.flops import FlopsPerToken
from tpu_experiments.planning.hlo.text import Kernel, Transfer
from tpu_experiments.runtime.patches import WRITTEN_FOR, fits

# With Pallas attention at this share of peak, two published MaxText steps on v6e-8 take 1.02 and 0.98 of their
# estimates; the share was chosen to fit them.
KERNEL_SHARE_OF_PEAK = 0.40
CALIBRATED = WRITTEN_FOR["libtpu"]
"""Version of libtpu whose estimates the calibrations of conf/hw are factors of."""
# Time of one hop between neighbours (jax-ml.github.io/scaling-book, "All About TPUs": about 1 microsecond).
HOP_SECONDS = 1e-6
ICI_PORTS = 4
TORUS_SIDE = 16
"""Only a side of 16 chips closes to a ring on v5e and v6e; shorter ones are open lines (same source)."""
# Bytes a chip receives per byte counted, beside the share (n - 1) / n of a ring of n chips.
RING_PASSES = {"all-gather": 1.0, "reduce-scatter": 1.0, "all-reduce": 2.0}


@dataclass(frozen=True)
class Calibration:
    """The factor that planned times are multiplied by, and its source."""

    factor: float = 1.0
    source: str = "none"
    relative_error: float | None = None
    """Largest deviation of the measurements after the factor; null where there is nothing to determine it from."""
    kernel_share_of_peak: float = KERNEL_SHARE_OF_PEAK


def calibration_of(hw: HwConfig, *, libtpu: str) -> Calibration:
    """Return `hw.calibration`, or one without effect.

    Args:
        libtpu: version of the compiler; measurements are held against one version's estimates.
    """
    given = hw.calibration
    if not fits("libtpu", libtpu):
        share = KERNEL_SHARE_OF_PEAK if given is None else given.kernel_share_of_peak
        return Calibration(
            1.0, f"none for libtpu {libtpu}; that of libtpu {CALIBRATED} does not hold for it", None, share
        )
    if given is None:
        return Calibration()
    return Calibration(given.factor, given.source, given.relative_error, given.kernel_share_of_peak)


@dataclass(frozen=True)
class StepWork:
    """Work of one optimizer step on one chip."""

    cycles: float
    """The compiler's estimated cycles, loops multiplied out, without Pallas kernels."""
    dot_flops: float
    """FLOPs of matrix products inside those cycles."""
    model_flops: float
    """FLOPs that the model needs, from which utilisation is computed (flops.FlopsPerToken.model x tokens)."""
    tokens: float
    """Tokens of this chip in one step, padding included."""
    kernels: tuple[Kernel, ...] = ()
    transfers: tuple[Transfer, ...] = ()


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of one optimizer step; only `total_s` and what derives from it are calibrated."""

    compute_s: float
    kernels_s: float
    network_s: float
    """All collectives, hidden or not."""
    exposed_network_s: float
    """Collectives that no computation hides."""
    total_s: float
    bound_by: str
    """The longest of three. `compute`: products and kernels at their peak. `memory`: all else on the chip. `network`:
    exposed collectives."""
    mfu: float
    """Model FLOPs utilisation, 0 to 1."""
    tokens_per_second_per_chip: float
    method: str = "compiled"
    """`compiled`: from the compiler's cycles. `analytic`: by a roofline, of a GPU FLOPs at an assumed share of peak.
    `datasheet`: the latter."""

    @property
    def uncalibrated_s(self) -> float:
        """Sum of the parts, in seconds."""
        return self.compute_s + self.kernels_s + self.exposed_network_s


def step_time(work: StepWork, *, chip: ChipConfig, topology: str | None, calibration: Calibration) -> StepTime:
    """Return the seconds of a compiled step.

    Raises:
        ConfigError: chips exchange data and the chip has no network.
    """
    peak = chip.peak_tflops_bf16 * 1e12
    compute = work.cycles / (chip.clock_ghz * 1e9)
    kernel_parts = [_kernel_seconds(kernel, chip=chip, calibration=calibration) for kernel in work.kernels]
    kernels = sum(flops_s + bytes_s for flops_s, bytes_s in kernel_parts)
    seconds = [(transfer, transfer_seconds(transfer, chip=chip, topology=topology)) for transfer in work.transfers]
    network = sum(second for _, second in seconds)
    hidden = sum(second * transfer.num_overlapped / max(1, transfer.count) for transfer, second in seconds)
    exposed = network - min(hidden, compute + kernels)
    products = min(compute, work.dot_flops / peak)
    busy = {
        "compute": products + sum(flops_s for flops_s, _ in kernel_parts),
        "memory": compute - products + sum(bytes_s for _, bytes_s in kernel_parts),
        "network": exposed,
    }
    total = (compute + kernels + exposed) * calibration.factor
    return StepTime(
        compute_s=compute,
        kernels_s=kernels,
        network_s=network,
        exposed_network_s=exposed,
        total_s=total,
        bound_by=max(busy, key=lambda part: busy[part]),
        mfu=work.model_flops / (total * peak),
        tokens_per_second_per_chip=work.tokens / total,
    )


def _kernel_seconds(kernel: Kernel, *, chip: ChipConfig, calibration: Calibration) -> tuple[float, float]:
    """Return seconds by FLOPs and by bytes; the shorter of the two is 0."""
    flops = kernel.count * (kernel.flops or 0.0) / (chip.peak_tflops_bf16 * 1e12 * calibration.kernel_share_of_peak)
    moved = kernel.count * kernel.num_bytes / (chip.hbm_gb_per_second * 1e9)
    return (flops, 0.0) if flops >= moved else (0.0, moved)


def transfer_seconds(transfer: Transfer, *, chip: ChipConfig, topology: str | None) -> float:
    """Return the seconds of all collectives of one kind in one step, as if nothing else used the network.

    One ring crosses a slice, in both directions: 2 of a chip's 4 ports receive at once, all 4 where the sides close to
    rings of their own. A link carries 1/8 of `ici_gb_per_second` in each direction.

    Raises:
        ConfigError: the chip has no network.
    """
    size = transfer.group_size
    if size <= 1:
        return 0.0
    if not chip.ici_gb_per_second:
        raise ConfigError(
            f"hw.chip.ici_gb_per_second=0; the step has {transfer.count} {transfer.kind} over {size} chips of "
            f"{chip.name}; give the chip its bandwidth, or use one chip."
        )
    link = chip.ici_gb_per_second * 1e9 / (2 * ICI_PORTS)
    if transfer.kind == "collective-permute":
        return transfer.num_bytes / link + transfer.count * HOP_SECONDS
    rate = link * links_in_use(topology, group_size=size)
    hops = transfer.count * HOP_SECONDS * size / 2
    if transfer.kind == "all-to-all":  # a quarter of gathering all size x num_bytes (scaling book, chapter 3)
        return transfer.num_bytes * size / 4 / rate + hops
    return RING_PASSES.get(transfer.kind, 1.0) * transfer.num_bytes * (size - 1) / size / rate + hops


def links_in_use(topology: str | None, *, group_size: int) -> int:
    """Return how many ports of a chip receive at once during a ring collective."""
    if group_size == 2:
        return 1
    sides = [int(side) for side in (topology or "").partition(":")[2].split("x") if side.isdigit()]
    return ICI_PORTS if sides and min(sides) >= TORUS_SIDE and group_size > TORUS_SIDE else 2


def datasheet_time(
    flops: FlopsPerToken, *, tokens: float, chip: ChipConfig, share_of_peak: float, method: str = "datasheet"
) -> StepTime:
    """Return the seconds of a step that is not compiled: its FLOPs at a share of one device's peak."""
    peak = chip.peak_tflops_bf16 * 1e12
    seconds = flops.total * tokens / (peak * share_of_peak)
    return StepTime(
        compute_s=seconds,
        kernels_s=0.0,
        network_s=0.0,
        exposed_network_s=0.0,
        total_s=seconds,
        bound_by="compute",
        mfu=flops.model * tokens / (seconds * peak),
        tokens_per_second_per_chip=tokens / seconds,
        method=method,
    )
