"""When a stage ends before its last step, and with what."""

from types import SimpleNamespace

import pytest

from tpu_experiments.checkpoint.progress import StageRecord
from tpu_experiments.config.schema import ExitTestConfig
from tpu_experiments.training.evaluation import Evaluation
from tpu_experiments.training.exit_test import apply_exit_test, exit_loss


def judged(losses, **settings):
    """The record after these held-out losses, one every ten steps, up to the end of the stage."""
    stage, record = SimpleNamespace(exit=ExitTestConfig(**settings), sources=("a",)), StageRecord("main")
    for number, loss in enumerate(losses, start=1):
        apply_exit_test(record, Evaluation(loss, 100, {"a": loss}), stage=stage, step=10 * number)
        if record.ended_by:
            return record, number
    return record, None


@pytest.mark.parametrize(
    ("losses", "settings", "ended_after"),
    [
        ([3.0, 2.0, 1.5, 1.4], {"eval_loss": 1.5}, 3),
        ([3.0, 2.0, 1.6], {"eval_loss": 1.5}, None),
        ([3.0, 3.1, 2.9, 3.0, 3.0], {"patience": 2}, 5),
        ([3.0, 2.9, 2.8, 2.7], {"patience": 2, "min_delta": 0.25}, 3),
        ([3.0, 2.9, 2.7, 2.6], {"patience": 2, "min_delta": 0.25}, None),
        ([float("nan"), float("nan")], {"patience": 2}, 2),
        ([float("nan"), 3.0, float("inf"), 2.0], {"patience": 2}, None),
    ],
)
def test_the_stage_ends_by_its_losses(losses, settings, ended_after):
    record, number = judged(losses, **settings)
    assert number == ended_after
    assert bool(record.ended_by) is (ended_after is not None)


def test_the_best_is_held_only_where_the_stage_ends_with_it():
    assert judged([3.0, 2.0, 2.5], ends_with="best")[0].held_step == 20
    assert judged([3.0, 2.0, 2.5], patience=9)[0].held_step is None
    assert judged([3.0, 2.0, 2.5], patience=9)[0].best_loss == 2.0


def test_the_best_is_the_lowest_whatever_patience_asks_for():
    record, number = judged([3.0, 2.9, 2.95], patience=2, min_delta=0.25, ends_with="best")
    assert (record.best_loss, record.held_step, number) == (2.9, 20, 3)
    assert record.ended_by == "2 evaluations in a row were not better than 3.0000 by more than 0.25 (exit.patience)"


def test_each_source_counts_the_same():
    evaluation = Evaluation(9.0, 100, {"a": 1.0, "b": 3.0, "c": 5.0})
    stage = SimpleNamespace(exit=ExitTestConfig(), sources=("a", "b"))
    assert exit_loss(evaluation, stage=stage) == 2.0
    stage.exit.sources = ["c"]
    assert exit_loss(evaluation, stage=stage) == 5.0
    stage.exit.sources = ["without_held_out_rows"]
    assert exit_loss(evaluation, stage=stage) == 9.0
