"""What the launcher reads from conf/hw without Hydra is what Hydra composes; prices and zones."""

import pytest

from launch.tpu_vm.errors import LaunchError
from launch.tpu_vm.slices import hw_of, load_slice, rentable
from tests.config.composing import composed


@pytest.mark.parametrize("hw", rentable())
def test_it_is_what_hydra_composes(hw: str) -> None:
    ours, hydras = load_slice(hw), composed(f"hw={hw}", "task=plan", "trainer.global_batch_rows=256").hw
    assert hydras.rent is not None
    assert hydras.price is not None
    assert ours.accelerator_type == hydras.rent.accelerator_type
    assert ours.runtime_version == hydras.rent.runtime_version
    assert (ours.chips, ours.chips_per_host) == (hydras.num_devices, hydras.rent.chips_per_host)
    assert list(ours.zones) == hydras.rent.zones
    assert ours.price["usd_per_chip_hour_spot"] == hydras.price.usd_per_chip_hour_spot


def test_an_hour_costs_the_price_of_its_region_and_elsewhere_the_highest() -> None:
    v6e8 = load_slice("v6e8")
    assert v6e8.usd_per_hour(spot=False, zone="europe-west4-a") == pytest.approx(23.76)
    assert v6e8.usd_per_hour(spot=False, zone="asia-northeast1-b") == pytest.approx(25.92)
    assert load_slice("v5e8").usd_per_hour(spot=False, zone="us-central1-a") == pytest.approx(9.60)
    assert load_slice("v5e8").usd_per_hour(spot=True, zone="us-east1-c") == pytest.approx(6.24)
    assert v6e8.usd_per_hour(spot=True, zone=None, override=0.5) == pytest.approx(4.0)


def test_a_slice_is_found_by_the_name_of_the_api() -> None:
    assert hw_of("v5litepod-8") == "v5e8"
    with pytest.raises(LaunchError, match="give hw= instead"):
        hw_of("v3-8")


@pytest.mark.parametrize("hw", ["cpu", "colab", "t4x2", "v9x9"])
def test_what_is_no_slice_is_refused_with_the_choices(hw: str) -> None:
    with pytest.raises(LaunchError, match="v6e8"):
        load_slice(hw)
