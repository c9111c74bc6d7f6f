"""Learning-rate multipliers at named steps, written out."""

import math

import pytest

from tpu_experiments.config.schema import ScheduleConfig
from tpu_experiments.optim.schedules import multiplier

EXACT = {"rel": 0, "abs": 1e-15}


def values(schedule: ScheduleConfig, num_steps: int) -> list[float]:
    return [multiplier(schedule, step=step, num_steps=num_steps) for step in range(num_steps)]


def test_constant():
    assert values(ScheduleConfig("constant"), 4) == [1.0, 1.0, 1.0, 1.0]


def test_constant_warms_up_to_the_peak_at_update_number_warmup_steps():
    assert values(ScheduleConfig("constant", warmup_steps=3), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_zero_on_the_last_update():
    assert values(ScheduleConfig("linear"), 5) == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_linear_with_warmup_and_floor():
    schedule = ScheduleConfig("linear", warmup_steps=1, floor=0.5)
    assert values(schedule, 6) == [0.5, 1.0, 0.875, 0.75, 0.625, 0.5]


def test_cosine_with_floor():
    expected = [1.0, 0.1 + 0.9 * 0.5 * (1 + math.sqrt(0.5)), 0.55, 0.1 + 0.9 * 0.5 * (1 - math.sqrt(0.5)), 0.1]
    assert values(ScheduleConfig("cosine", floor=0.1), 5) == pytest.approx(expected, **EXACT)


def test_cosine_starts_its_fall_after_the_warmup():
    schedule = ScheduleConfig("cosine", warmup_steps=2)
    assert values(schedule, 5) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.5, 0.0], **EXACT)


def test_wsd_holds_the_peak_then_falls_over_the_last_share_of_steps():
    schedule = ScheduleConfig("wsd", warmup_steps=1, decay_fraction=0.3)
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    assert values(schedule, 10) == pytest.approx(expected, **EXACT)


def test_wsd_falls_over_a_whole_number_of_steps_rounded_up():
    """0.25 of 10 steps are 3, 0.01 of 10 is 1: the last update is at the floor."""
    assert values(ScheduleConfig("wsd", warmup_steps=0, decay_fraction=0.25), 10) == [1.0] * 8 + [0.5, 0.0]
    assert values(ScheduleConfig("wsd", warmup_steps=0, decay_fraction=0.35), 10)[5:] == pytest.approx(
        [1.0, 1.0, 2 / 3, 1 / 3, 0.0], **EXACT
    )


def test_wsd_decay_never_starts_inside_the_warmup():
    schedule = ScheduleConfig("wsd", warmup_steps=3, decay_fraction=1.0, floor=0.2)
    assert values(schedule, 6) == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.6, 0.2], **EXACT)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_a_single_step_runs_at_the_peak(name):
    assert values(ScheduleConfig(name, floor=0.1), 1) == [1.0]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_a_warmup_longer_than_the_stage_only_rises(name):
    assert values(ScheduleConfig(name, warmup_steps=9), 3) == [0.25, 0.5, 0.75]
