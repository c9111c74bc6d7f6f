"""The machines of conf/hw agree with their topologies, with each other and with Google's figures."""

import functools
from dataclasses import replace
from math import prod

import pytest

from tests.config.composing import composed, names, of_file, refusal
from tpu_experiments.config.hardware import CalibrationConfig, HwConfig
from tpu_experiments.config.identity import config_hash

LARGEST = "trainer.global_batch_rows=256"


@functools.cache
def machine(name: str) -> HwConfig:
    """The machine, composed once for all tests that read it."""
    return composed(f"hw={name}", LARGEST, "task=plan").hw


GPUS = {
    "t4": (16, 14.75, 65, 320, 1.59),
    "t4x2": (16, 14.75, 65, 320, 1.59),
    "l4": (24, None, 121, 300, 2.04),
    "rtx4090": (24, 23.52, 165.2, 1008, 2.52),
    "a100": (80, 79.15, 312, 2039, 1.41),
    "h100": (80, None, 989.4, 3350, 1.83),
}
TPUS = [name for name in names("hw") if of_file("hw", name).get("device", HwConfig.device) == "tpu"]
CLOUD = [name for name in TPUS if not name.startswith("colab")]


def test_the_sizes_that_are_planned_for() -> None:
    assert [name for name in names("hw") if machine(name).device == "tpu"] == TPUS
    sizes = {f"{chip}{count}" for chip in ("v5e", "v6e") for count in (1, 4, 8, 16, 256)}
    assert set(CLOUD) == sizes | {"v4-8", "v5p-8", "v7x-8"}


@pytest.mark.parametrize("name", TPUS)
def test_a_topology_has_as_many_chips_as_the_machine(name: str) -> None:
    hw = machine(name)
    assert hw.chip is not None
    assert hw.topology is not None
    generation, _, sides = hw.topology.partition(":")
    of_a_chip = 2 if generation == "tpu7x" else 1
    assert {"tpu7x": "v7x"}.get(generation, generation) == hw.chip.name
    assert of_a_chip * prod(int(side) for side in sides.split("x")) == hw.num_devices
    assert (hw.parallel == "inline") == (hw.num_devices == 1)
    assert (hw.chip.ici_gb_per_second == 0) == (hw.num_devices == 1)


@pytest.mark.parametrize("name", TPUS)
def test_a_generation_has_one_datasheet(name: str) -> None:
    chip = machine(name).chip
    assert chip is not None
    expected = {
        "v4": (32, 30.75, 275, 1200, 1.05),
        "v5e": (16, 15.75, 197, 819, 1.5),
        "v5p": (95, 95, 459, 2765, 1.75),
        "v6e": (32, 31.25, 918, 1638, 1.75),
        "v7x": (96, None, 1153.5, 3690, 1.75),  # a device, of which a chip has two
    }[chip.name]
    figures = (chip.hbm_gib, chip.program_hbm_gib, chip.peak_tflops_bf16, chip.hbm_gb_per_second, chip.clock_ghz)
    assert figures == expected


@pytest.mark.parametrize("name", [name for name in CLOUD if name != "v7x-8"])  # whose price no dated list has
def test_a_price_is_in_its_range_and_has_a_date_and_a_source(name: str) -> None:
    price = machine(name).price
    assert price is not None
    assert price.usd_per_chip_hour_spot is not None
    assert price.on_demand_range[0] <= price.usd_per_chip_hour_on_demand <= price.on_demand_range[1]
    assert price.spot_range[0] <= price.usd_per_chip_hour_spot <= price.spot_range[1]
    assert price.date.startswith("2026-")
    assert price.source


@pytest.mark.parametrize("name", ["v4-8", "v5p-8"])
def test_a_slice_that_is_named_after_its_cores_has_half_as_many_chips(name: str) -> None:
    hw = machine(name)
    assert hw.rent is not None
    assert (hw.num_devices, hw.num_hosts, hw.rent.accelerator_type, hw.rent.chips_per_host) == (4, 1, name, 4)
    refused = refusal(f"hw={name}", "hw.num_devices=8", LARGEST)
    assert "hw.num_devices=8 with hw.num_hosts=1; a host of v4 or v5p has 4 chips (two cores each, " in refused
    assert refused.endswith(f"or use hw={name} as it is.")


def test_gpus_have_a_datasheet_and_a_dated_price() -> None:
    assert {name for name in names("hw") if machine(name).device == "cuda"} == {*GPUS, "gpu"}
    for name, expected in GPUS.items():
        hw = machine(name)
        assert (hw.runtime, hw.parallel) == ("eager", "spawn" if hw.num_devices > 1 else "inline")
        assert hw.chip is not None
        chip, price = hw.chip, hw.price
        figures = (chip.hbm_gib, chip.program_hbm_gib, chip.peak_tflops_bf16, chip.hbm_gb_per_second, chip.clock_ghz)
        assert figures == expected
        assert price is not None
        assert price.date.startswith("2026-")
        assert price.source
        assert chip.source
    assert (machine("gpu").chip, machine("gpu").price) == (None, None)


def test_the_hour_of_eight_chips() -> None:
    """9.60 and 23.76 dollars on demand; 4.80, as one published recipe has it, is four chips."""
    for name, hourly in (("v5e8", 9.60), ("v6e8", 23.76)):
        hw = machine(name)
        assert hw.price is not None
        assert hw.num_devices * hw.price.usd_per_chip_hour_on_demand == pytest.approx(hourly)


def test_the_machine_and_its_calibration_do_not_make_another_run() -> None:
    plain = composed("hw=v5e8", "name=x", LARGEST, "task=plan")
    for other in ("v6e256", "t4x2"):
        assert config_hash(composed(f"hw={other}", "name=x", LARGEST, "task=plan")) == config_hash(plain)
    hw = replace(plain.hw, calibration=CalibrationConfig(1.1, 0.08, 0.4, "measured"))
    assert config_hash(replace(plain, hw=hw)) == config_hash(plain)


def test_several_hosts() -> None:
    """As many as the slice has VMs, one process each; what reads one host's disk runs on one."""
    for name in ("v5e16", "v6e16", "v5e256", "v6e256"):
        hw = composed(f"hw={name}", LARGEST).hw
        assert hw.rent is not None
        assert hw.num_hosts * hw.rent.chips_per_host == hw.num_devices
    refused = {
        ("hw=v5e16", "hw.num_hosts=1"): "hw.num_devices=16 with hw.num_hosts=1; a host of v5e or v6e has at most 8",
        ("hw=v5e16", "hw.num_hosts=3"): "hw.num_hosts=3 with hw.num_devices=16; every host has as many devices",
        ("hw=v5e16", "hw.parallel=spawn"): "hw.num_hosts=4 with hw.runtime=xla hw.parallel=spawn; several hosts are",
        ("hw=v5e16", "task=resume_check"): "hw.num_hosts=4 with task=resume_check; it runs on one host",
        ("hw=v5e16", "task=evaluate"): "hw.num_hosts=4 with task=evaluate; it runs on one host",
    }
    for words, sentence in refused.items():
        assert sentence in refusal(*words, LARGEST)
