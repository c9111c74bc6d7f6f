"""Dollars of a sweep's points, and the limit that stops them."""

import json
from pathlib import Path

import pytest

from tests.config.composing import composed
from tests.training.runs import run
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.sweeping.budget import check_price, seconds_left, usd_of


def test_the_rest_of_the_limit_pays_for_hours_of_the_machine() -> None:
    config = composed("hw=v5e8", "trainer.global_batch_rows=8", "sweeping.max_usd=12")
    check_price(config)
    assert usd_of(config, 3600) == pytest.approx(9.60)  # 8 chips at $1.20
    assert seconds_left(config, spent_usd=2.40) == pytest.approx(3600)
    assert seconds_left(config, spent_usd=20.0) == 0.0
    assert seconds_left(composed("hw=v5e1"), spent_usd=2.40) is None


def test_a_limit_without_a_price_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sweeping\.max_usd=5; hw=cpu has no price on demand"):
        check_price(composed("hw=cpu", "sweeping.max_usd=5"))
    check_price(composed("hw=cpu"))


@pytest.mark.slow
def test_points_that_have_cost_the_limit_are_stopped_and_saved(tmp_path: Path) -> None:
    price = ("hw=v5e1", "hw.device=cpu", "hw.price.usd_per_chip_hour_on_demand=3600")  # a dollar a second
    small = ("debug=smoke", "hw.runtime=eager", "data=sample_text", "curriculum=single", "logger=jsonl", "name=tried")
    steps = ("curriculum.stages.main.steps=100000", "trainer.max_stage_steps=100000")
    ended = run("-m", *price, *small, *steps, "lora.r=4,8", "sweeping.max_usd=25", output_dir=tmp_path)
    assert ended.returncode == 75, ended.stderr
    assert "sweeping.max_usd=25: the points have cost $25." in ended.stderr
    assert "the same command resumes with lora.r=4; lora.r=8" in ended.stderr
    rows = json.loads((tmp_path / "sweeps/tried/sweep.json").read_text())["points"]
    assert [row["status"] for row in rows] == ["stopped", "waiting"]
    assert list((tmp_path / "sweeps/tried/lora.r=4/checkpoints").iterdir())
