"""What each point gets of a host, and which are refused there."""

from pathlib import Path

import pytest

from tests.config.composing import composed
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.runtime.processes.chips import chip_variables
from tpu_experiments.sweeping import placement
from tpu_experiments.sweeping.placement import Place, check_places, place_of, share_of_cores

KAGGLE = {"TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1", "TPU_HOST_BOUNDS": "1,1,1", "TPU_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


@pytest.fixture
def _eight_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "num_chips_present", lambda: 8)


def test_each_of_eight_points_has_a_chip_and_a_port_of_its_own(tmp_path: Path) -> None:
    config = composed("hw=v5e1", "sweeping.points_at_once=8", f"hw.compile_cache={tmp_path}/compile_cache")
    places = [place_of(slot, config) for slot in range(8)]
    assert [place.env["TPU_VISIBLE_CHIPS"] for place in places] == list("01234567")
    assert [place.env["TPU_PROCESS_PORT"] for place in places] == [str(port) for port in range(8476, 8484)]
    for place in places:
        assert place.env["TPU_CHIPS_PER_PROCESS_BOUNDS"] == place.env["TPU_PROCESS_BOUNDS"] == "1,1,1"
        assert place.env["TPU_PROCESS_ADDRESSES"] == f"localhost:{place.env['TPU_PROCESS_PORT']}"
        assert place.cores is None
    assert len({place.overrides for place in places}) == 8
    assert places[3].overrides == (f"hw.compile_cache={tmp_path}/compile_cache/slot_3",)


def test_what_a_container_exports_for_the_whole_host_is_narrowed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not set(chip_variables(2)) & set(KAGGLE)
    for name, value in KAGGLE.items():
        monkeypatch.setenv(name, value)
    values = chip_variables(2)
    assert {name: values[name] for name in KAGGLE} == {
        "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1",
        "TPU_HOST_BOUNDS": "1,1,1",
        "TPU_VISIBLE_DEVICES": "2",
    }


def test_cores_are_shared_in_parts_that_do_not_overlap() -> None:
    usable = {0, 1, 2, 3, 8, 9, 10}
    shares = [share_of_cores(slot, count=3, usable=usable) for slot in range(3)]
    assert [sorted(share) for share in shares] == [[0, 1], [2, 3], [8, 9]]
    assert [sorted(share_of_cores(slot, count=4, usable={5, 6})) for slot in range(4)] == [[5], [6], [5], [6]]


@pytest.mark.parametrize("overrides", [["hw=v5e1"], ["hw=cpu"]])
def test_a_point_by_itself_has_the_whole_host(overrides: list[str]) -> None:
    assert place_of(0, composed(*overrides)) == Place()
    assert place_of(1, composed("task=plan", "hw=v5e1", "sweeping.points_at_once=4")) == Place()


@pytest.mark.usefixtures("_eight_chips")
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["hw=v5e8", "trainer.global_batch_rows=8"], "a point on hw=v5e8 takes 8 chips, and side by side each has one"),
        (["hw=v5e1", "sweeping.points_at_once=16"], "points_at_once=16; this host has 8 chips; use 8 or fewer."),
        (["hw.device=cuda", "hw.runtime=eager"], "hw.device=cuda is one device that all would share; use 1."),
        (["hw=v5e16", "trainer.global_batch_rows=16"], "hw.num_hosts=4 with -m; each host would choose its points"),
    ],
)
def test_points_that_have_no_place_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_places(composed("sweeping.points_at_once=2", *overrides))
    assert said in str(refused.value)


@pytest.mark.usefixtures("_eight_chips")
def test_as_many_points_as_chips_are_not_refused() -> None:
    check_places(composed("sweeping.points_at_once=8", "hw=v5e1"))
    check_places(composed("sweeping.points_at_once=64"))
