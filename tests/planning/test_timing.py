"""Step seconds against hand-made numbers and the two published steps of the design note."""

from dataclasses import replace

import pytest

from tests.config.composing import composed
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import CalibrationConfig
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.metrics.flops import Recomputed, flops_of_token
from tpu_experiments.planning.hlo.text import Kernel, Transfer
from tpu_experiments.planning.timing import (
    HOP_SECONDS,
    Calibration,
    StepWork,
    calibration_of,
    datasheet_time,
    step_time,
    transfer_seconds,
)

V5E, V6E = composed("hw=v5e8").hw, composed("hw=v6e8").hw
WORK = StepWork(cycles=1.5e9, dot_flops=150e12, model_flops=100e12, tokens=8192)
NONE = Calibration()


def time_of(work: StepWork, calibration: Calibration = NONE):
    return step_time(work, chip=V5E.chip, topology=V5E.topology, calibration=calibration)


@pytest.mark.parametrize(
    ("xla_seconds", "kernel_flops", "published", "ratio"), [(4.58, 5.94e14, 6.320, 1.02), (2.71, 2.97e14, 3.443, 0.98)]
)
def test_the_published_steps_come_out_as_in_the_design_note(
    xla_seconds: float, kernel_flops: float, published: float, ratio: float
) -> None:
    kernels = (Kernel("attention", 1, kernel_flops, 0.0),)
    work = StepWork(xla_seconds * 1.75e9, 0.0, 1.0, 1.0, kernels)
    time = step_time(work, chip=V6E.chip, topology=V6E.topology, calibration=NONE)
    assert published / time.total_s == pytest.approx(ratio, abs=0.01)


def test_cycles_are_seconds_at_the_clock() -> None:
    time = time_of(WORK)
    assert (time.compute_s, time.kernels_s, time.network_s) == (pytest.approx(1.0), 0, 0)
    assert time.mfu == pytest.approx(100 / 197)
    assert time.tokens_per_second_per_chip == pytest.approx(8192)
    assert time.bound_by == "compute"


def test_a_chip_that_mostly_moves_bytes_is_bound_by_memory() -> None:
    assert time_of(replace(WORK, dot_flops=90e12)).bound_by == "memory"


def test_the_calibration_multiplies_the_total_and_nothing_else() -> None:
    plain, slower = time_of(WORK), time_of(WORK, Calibration(1.25, "test"))
    assert slower.total_s == pytest.approx(1.25 * plain.total_s)
    assert slower.uncalibrated_s == plain.uncalibrated_s == plain.total_s
    assert slower.mfu == pytest.approx(plain.mfu / 1.25)
    assert slower.tokens_per_second_per_chip == pytest.approx(plain.tokens_per_second_per_chip / 1.25)


def test_a_kernel_takes_its_flops_or_its_bytes_whichever_is_longer() -> None:
    by_flops = Kernel("a", 2, 0.5 * 0.4 * 197e12, 0.4 * 819e9)
    by_bytes = Kernel("b", 3, 0.5 * 0.4 * 197e12, 819e9)
    assert time_of(replace(WORK, kernels=(by_flops,))).kernels_s == pytest.approx(2 * 0.5)
    time = time_of(replace(WORK, kernels=(by_bytes,)))
    assert time.kernels_s == pytest.approx(3.0)
    assert time.bound_by == "memory"
    half = Calibration(kernel_share_of_peak=0.2)
    assert time_of(replace(WORK, kernels=(by_flops,)), half).kernels_s == pytest.approx(2 * 1.0)


@pytest.mark.parametrize(
    ("kind", "num_bytes", "seconds"),
    [
        ("all-gather", 16e9, 16 * 7 / 8 / 100),
        ("reduce-scatter", 16e9, 16 * 7 / 8 / 100),
        ("all-reduce", 16e9, 2 * 16 * 7 / 8 / 100),
        ("all-to-all", 2e9, 16 / 4 / 100),
        ("collective-permute", 1e9, 1 / 50),
    ],
)
def test_collectives_on_eight_v5e(kind: str, num_bytes: float, seconds: float) -> None:
    """Two of four links of 50 GB/s each way receive at once."""
    moved = Transfer(kind, 0, num_bytes, 0, 8)
    assert transfer_seconds(moved, chip=V5E.chip, topology="v5e:2x4") == pytest.approx(seconds)
    assert transfer_seconds(moved, chip=V6E.chip, topology="v6e:2x4") == pytest.approx(seconds / 2)


def test_many_small_collectives_pay_their_hops() -> None:
    tiny = Transfer("all-reduce", 1000, 0.0, 0, 8)
    assert transfer_seconds(tiny, chip=V5E.chip, topology="v5e:2x4") == pytest.approx(1000 * 4 * HOP_SECONDS)


def test_a_whole_pod_is_a_torus_and_uses_all_links() -> None:
    moved = Transfer("all-gather", 0, 1e9, 0, 256)
    pod, line = (transfer_seconds(moved, chip=V5E.chip, topology=f"v5e:{sides}") for sides in ("16x16", "8x32"))
    assert line == pytest.approx(2 * pod)
    two = Transfer("all-gather", 0, 1e9, 0, 2)
    assert transfer_seconds(two, chip=V5E.chip, topology="v5e:1x2") == pytest.approx(0.5 / 50)
    assert transfer_seconds(replace(two, group_size=1), chip=V5E.chip, topology=None) == 0


def test_overlapped_collectives_hide_as_far_as_the_computation_lasts() -> None:
    moved = Transfer("all-gather", 4, 80e9, 0, 8)
    whole = transfer_seconds(moved, chip=V5E.chip, topology="v5e:2x4")
    exposed = time_of(replace(WORK, transfers=(moved,)))
    assert exposed.exposed_network_s == exposed.network_s == pytest.approx(whole)
    half = time_of(replace(WORK, transfers=(replace(moved, num_overlapped=2),)))
    assert half.exposed_network_s == pytest.approx(whole / 2)
    long = time_of(replace(WORK, transfers=(replace(moved, num_bytes=800e9, num_overlapped=4),)))
    assert long.exposed_network_s == pytest.approx(long.network_s - 1.0)
    assert (exposed.bound_by, long.bound_by) == ("compute", "network")


def test_a_chip_without_a_network_refuses_to_exchange() -> None:
    chip = composed("hw=v6e1").hw.chip
    with pytest.raises(ConfigError, match=r"hw\.chip\.ici_gb_per_second=0; .* 3 all-reduce over 4 chips of v6e"):
        transfer_seconds(Transfer("all-reduce", 3, 1e6, 0, 4), chip=chip, topology="v6e:1x1")


def test_the_calibration_of_a_machine_is_the_one_in_its_file() -> None:
    assert calibration_of(composed("hw=cpu").hw, libtpu="0.0.21") == Calibration(1.0, "none")
    hw = replace(V6E, calibration=CalibrationConfig(1.04, 0.08, 0.5, "published"))
    for same in ("0.0.21", "0.0.21.1"):  # of a step with the kernel both have the same cycles (tests/images)
        assert calibration_of(hw, libtpu=same) == Calibration(1.04, "published", 0.08, 0.5)
    other = calibration_of(hw, libtpu="0.0.52")
    assert (other.factor, other.relative_error, other.kernel_share_of_peak) == (1.0, None, 0.5)
    assert other.source.startswith("none for libtpu 0.0.52")


def test_a_datasheet_time_executes_the_recomputation_and_does_not_count_it() -> None:
    chip = composed("hw=t4x2").hw.chip
    arch = composed("model=qwen05b").model.arch
    flops = flops_of_token(arch, seq_len=1000, lora=LoraConfig(r=0), recomputed=Recomputed())
    time = datasheet_time(flops, tokens=4000, chip=chip, share_of_peak=0.5)
    assert time.total_s == pytest.approx(flops.total * 4000 / 32.5e12)
    assert time.mfu == pytest.approx(0.5 * flops.model / flops.total)
    assert time.method == "datasheet"
