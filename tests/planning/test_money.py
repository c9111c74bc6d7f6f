"""Hours and dollars by hand, and published prices put right."""

from dataclasses import replace

import pytest

from tests.config.composing import composed
from tests.planning.examples import LORA, MISTRAL, example_plan
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.metrics.flops import flops_of_token
from tpu_experiments.planning.compare import SHARE_OF_PEAK, datasheet_comparison
from tpu_experiments.planning.money import Dollars, RunLength, StageLength, cost_of, usd_per_million_tokens
from tpu_experiments.planning.timing import Calibration, datasheet_time

V5E8 = composed("hw=v5e8").hw
STAGES = (StageLength("text", 100, 90.0, 3_000_000, 3.0), StageLength("chat", 50, 90.0, 1_000_000, 1.0))
RUN = RunLength(STAGES, eval_seconds=900, checkpoint_seconds=300, compile_seconds=600, setup_seconds=2700)
FLOPS = flops_of_token(MISTRAL, seq_len=2048, lora=LORA)


def test_five_hours_on_v5e8_cost_five_times_9_60() -> None:
    """A published recipe has 4.80 an hour for eight chips; it is 8 x 1.20."""
    cost = cost_of(RUN, price=V5E8.price, num_devices=8, calibration=Calibration())
    assert RUN.parts["training"] == 150 * 90
    assert cost.hours == pytest.approx(5.0)
    assert cost.hourly.on_demand == pytest.approx(9.60)
    assert cost.usd == Dollars(pytest.approx(5 * 8 * 0.245), pytest.approx(48.0))
    assert cost.spot_saving == pytest.approx(1 - 0.245 / 1.20)
    assert cost.hours_range is None


def test_epochs_are_weighted_by_tokens_and_the_cost_is_shared_among_them() -> None:
    assert RUN.epochs == pytest.approx(4_000_000 / 2_000_000)
    cost = cost_of(RUN, price=V5E8.price, num_devices=8, calibration=Calibration())
    assert cost.usd_per_epoch.on_demand == pytest.approx(24.0)
    unknown = replace(RUN, stages=(STAGES[0], replace(STAGES[1], epochs=None)))
    assert unknown.epochs is None
    assert cost_of(unknown, price=V5E8.price, num_devices=8, calibration=Calibration()).usd_per_epoch == Dollars(
        None, None
    )


def test_the_range_spans_regions_and_the_error_of_the_step() -> None:
    cost = cost_of(RUN, price=V5E8.price, num_devices=8, calibration=Calibration(1.0, "x", 0.1))
    assert cost.hours_range == (pytest.approx(4.6), pytest.approx(5.4))  # 4 of 5 hours are steps and evaluation
    assert cost.usd_range.on_demand == (pytest.approx(4.6 * 8 * 1.20), pytest.approx(5.4 * 8 * 1.56))
    assert cost.usd_range.spot == (pytest.approx(4.6 * 8 * 0.245), pytest.approx(5.4 * 8 * 0.78))


def test_without_a_price_there_are_hours_and_no_dollars() -> None:
    cost = cost_of(RUN, price=None, num_devices=1, calibration=Calibration())
    assert (cost.hours, cost.usd, cost.usd_range.spot, cost.spot_saving) == (5.0, Dollars(None, None), None, None)


def test_a_million_tokens_is_a_price_of_the_steady_state() -> None:
    assert V5E8.chip is not None
    step = datasheet_time(FLOPS, tokens=1000, chip=V5E8.chip, share_of_peak=0.4)
    usd = usd_per_million_tokens(step, price=V5E8.price)
    assert usd.on_demand == pytest.approx(1e6 * FLOPS.total / (0.4 * 197e12) / 3600 * 1.20)


def test_two_t4_as_one_more_row() -> None:
    t4 = composed("hw=t4x2").hw
    row = datasheet_comparison(t4, flops=FLOPS, tokens_per_step=40_000, run=RUN, fits=True)
    speed = 2 * SHARE_OF_PEAK * 65e12 / FLOPS.total
    assert (row.hw, row.chips, row.fits, row.method) == ("t4x2", 2, True, "datasheet")
    assert row.tokens_per_second == pytest.approx(speed)
    assert row.step_seconds == pytest.approx(40_000 / speed)
    training = RUN.tokens / speed
    seconds = training + 900 * training / 13_500 + 300 + 2700
    assert row.hours == pytest.approx(seconds / 3600)
    assert row.usd == Dollars(None, pytest.approx(seconds / 3600 * 2 * 0.35))


def test_a_machine_without_datasheet_cannot_be_compared() -> None:
    with pytest.raises(ConfigError, match=r"hw=cpu; it has no datasheet"):
        datasheet_comparison(composed("hw=cpu").hw, flops=FLOPS, tokens_per_step=1)


def test_a_plan_is_a_row_of_the_same_kind() -> None:
    plan = example_plan()
    row = plan.as_comparison()
    assert plan.time is not None
    assert row.tokens_per_second == pytest.approx(32 * 2048 / plan.time.total_s)
    without = replace(plan, fits=False, time=None, cost=None).as_comparison()
    assert (without.step_seconds, without.tokens_per_second, without.fits) == (None, None, False)


def test_two_t4_that_do_not_hold_the_step_have_no_time() -> None:
    row = datasheet_comparison(composed("hw=t4x2").hw, flops=FLOPS, tokens_per_step=40_000, run=RUN, fits=False)
    assert (row.fits, row.step_seconds, row.hours, row.usd) == (False, None, None, Dollars(None, None))
    assert row.assumption == "t4x2: by formulas the step does not fit into a T4's memory, one row at a time"
