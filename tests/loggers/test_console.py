"""Progress on stderr, as lines and as a bar."""

import io
import logging
import math
import sys
from collections.abc import Callable

import pytest

from tpu_experiments.loggers.base import LoggerContext
from tpu_experiments.loggers.console import ConsoleLogger, Pace
from tpu_experiments.loggers.runlog import start_run_log, stop_run_log

MakeContext = Callable[..., LoggerContext]
RECORD = {"train/loss": 2.5, "train/lr": 1e-3, "train/grad_norm": 0.25, "perf/tokens_per_second": 12345.0}


def test_lines_have_one_width_and_every_column(make_context: MakeContext, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logger = ConsoleLogger(make_context(), style="lines")
    logger.scalars(1, {"train/loss": 10.0})
    logger.scalars(50, RECORD | {"perf/step_seconds": 0.02})
    logger.scalars(100, RECORD)
    logger.finish()
    lines = caplog.messages
    assert len({len(line) for line in lines}) == 1
    for part in ("step  50/100", "loss   2.5000", "lr  1.00e-03", "grad     0.250", "12,345 tok/s", "20.0 ms/step"):
        assert part in lines[1]
    assert lines[0].endswith("left -:--:--") or "left 0:" in lines[0]
    assert lines[2].endswith("left 0:00:00")


def test_an_evaluation_is_a_line_of_its_own(make_context: MakeContext, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logger = ConsoleLogger(make_context(), style="lines")
    logger.scalars(7, {"eval/loss": 2.0, "eval/perplexity": 7.389})
    assert caplog.messages == ["step 7/100  eval/loss 2.0000  eval/perplexity 7.3890"]


def test_measures_are_shown_once_and_of_a_source_the_loss_alone(
    make_context: MakeContext, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    logger = ConsoleLogger(make_context("objective=dpo", "data=stories_pairs_ro", "curriculum=single"))
    one = {"eval/loss": 0.5, "eval/loss_a": 0.5, "eval/rewards/margins": 1.0, "eval/rewards/margins_a": 1.0}
    logger.scalars(7, one | {"eval/logps/chosen": -3.0, "eval/logps/chosen_a": -3.0})
    logger.scalars(8, one | {"eval/loss_b": 0.25, "eval/rewards/margins_b": 2.0})
    assert caplog.messages == [
        "step 7/100  eval/loss 0.5000  eval/rewards/margins 1.0000",
        "step 8/100  eval/loss 0.5000  eval/loss_a 0.5000  eval/rewards/margins 1.0000  eval/loss_b 0.2500",
    ]
    logger.scalars(9, {"train/loss": 0.4, "train/rewards/accuracies": 0.75, "train/rewards/margins": 1.0})
    assert "grad         -  rewards/accuracies 0.7500  " in caplog.messages[-1]


def test_a_bar_advances_to_the_step_and_survives_log_lines(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch, root_logger: logging.Logger
) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    context = make_context(resume_step=20)
    start_run_log(context.run_folder, rank=0)
    logger = ConsoleLogger(context, style="bar")
    logger.scalars(60, RECORD)
    logger.scalars(60, {"eval/loss": 2.0})
    logger.scalars(100, RECORD)
    assert logger._bar is not None
    assert logger._bar.n == 100
    logger.finish()
    stop_run_log()
    shown = stderr.getvalue()
    assert "100/100" in shown
    assert "loss 2.5000, lr 1.00e-03, 12,345 tok/s" in shown
    assert "eval/loss 2.0000" in shown
    assert "ms/step" not in shown  # the bar stands for the lines, which run.log has
    with open(context.run_folder.path("run.log")) as file:
        assert file.read().count("ms/step") == 2


def test_no_bar_without_a_terminal(make_context: MakeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert ConsoleLogger(make_context())._bar is None


def test_the_pace_leaves_the_compilation_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("tpu_experiments.loggers.console.time.monotonic", lambda: now)
    pace = Pace(0)
    now = 100.0
    pace.advance(10, is_steady=False)
    assert math.isnan(pace.seconds_per_step)
    assert pace.last_seconds_per_step == 10.0
    now = 101.0
    pace.advance(20, is_steady=True)
    assert pace.seconds_per_step == pytest.approx(0.1)
    now = 151.0  # another program was compiled
    pace.advance(30, is_steady=False)
    assert pace.seconds_per_step == pytest.approx(0.1)
    now = 153.0
    pace.advance(40, is_steady=True)
    assert pace.seconds_per_step == pytest.approx(3 / 20)


def test_the_pace_leaves_out_what_comes_before_the_first_step(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The model is loaded and evaluated for 190 s before steps of 10 s; in plain torch the first record is steady."""
    caplog.set_level(logging.INFO)
    now = 0.0
    monkeypatch.setattr("tpu_experiments.loggers.console.time.monotonic", lambda: now)
    logger = ConsoleLogger(make_context(), style="lines")
    now = 190.0
    logger.text(0, tag="stage", text="stage main")
    now = 200.0
    logger.scalars(1, RECORD)
    assert caplog.messages[-1].endswith("left 0:16:30")
    now = 260.0  # an evaluation of 50 s belongs to the steps, and so does the border of a stage
    logger.text(2, tag="stage", text="stage two")
    logger.scalars(2, RECORD)
    assert caplog.messages[-1].endswith("left 0:57:10")


def test_a_record_with_a_compilation_says_no_time_left(
    make_context: MakeContext, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    logger = ConsoleLogger(make_context(), style="lines")
    logger.scalars(1, {"train/loss": 2.5})
    logger.scalars(2, RECORD)
    assert caplog.messages[0].endswith("left -:--:--")
    assert "left 0:" in caplog.messages[1]
