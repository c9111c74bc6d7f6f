"""Estimates of a plan, read from the files that a run.py of a few lines writes where the real one does."""

from pathlib import Path

import pytest

from launch.tpu_vm import job
from launch.tpu_vm.errors import LaunchError
from launch.tpu_vm.launches import check_price
from launch.tpu_vm.money import Limits
from launch.tpu_vm.settings import Settings

RUN_PY = """
import json, pathlib, sys
given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
folder = pathlib.Path(given["output_dir"])
assert given["task"] == "plan"
points = [folder / "plans" / given["name"]]
if "-m" in sys.argv:
    points = [folder / "sweeps" / given["name"] / "plans" / value for value in given["lora.r"].split(",")]
for point in points:
    point.mkdir(parents=True, exist_ok=True)
    fits = "77" not in point.name
    content = {"fits": fits, "hours": 1.5, "usd": {"spot": 2.0, "on_demand": 4.0}, "method": "compiled"}
    (point / "plan.json").write_text(json.dumps(content))
"""
LIMITS = Limits(usd_per_hour=12.0, max_usd=None, max_hours=24.0, queue_seconds=1.0, zone_seconds=1.0)
ONE = ("experiment=x", "name=ranks", "output_dir=gs://bkt/runs")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.py").write_text(RUN_PY)
    monkeypatch.setattr(job, "ROOT", tmp_path)
    return tmp_path / "outputs"


def estimate(results: Path, *overrides: str, spot: bool = True) -> job.Estimate:
    return job.estimated((*overrides, *ONE), run_name="ranks", spot=spot, results=results)


def test_an_estimate_is_what_the_plan_says(results: Path) -> None:
    assert estimate(results) == job.Estimate(True, 1.5, 2.0, "compiled")
    assert estimate(results, spot=False).usd == 4.0


def test_a_sweep_takes_the_hours_of_its_points_and_the_price_of_the_machine(results: Path) -> None:
    assert estimate(results, "-m", "lora.r=8,16,32") == job.Estimate(True, 4.5, None, "compiled, 3 points")
    shared = estimate(results, "-m", "lora.r=8,16,32,64", "sweeping.points_at_once=4")
    assert shared.hours == 1.5
    said: list[str] = []
    check_price(shared, Settings(), LIMITS, say=said.append)
    assert said == [
        "planned (compiled, 4 points): it fits, 1.5 h, $18.00",
        "max_usd=27.00, 1.5 times the planned hours at the highest price of the zones",
    ]
    with pytest.raises(LaunchError, match=r"max_usd=10; the plan says \$18.00"):
        check_price(shared, Settings(max_usd=10.0), LIMITS, say=said.append)


def test_points_of_an_earlier_plan_are_not_counted(results: Path) -> None:
    estimate(results, "-m", "lora.r=8,16,32")
    assert estimate(results, "-m", "lora.r=8").hours == 1.5


def test_a_point_that_does_not_fit_rents_nothing(results: Path) -> None:
    with pytest.raises(LaunchError, match="does not fit"):
        estimate(results, "-m", "lora.r=8,77")
