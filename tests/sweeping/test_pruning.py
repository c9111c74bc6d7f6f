"""The median rule, held against a reading of Optuna's own, and what is read of a run that is under way."""

import json
import random
import statistics
from pathlib import Path

import pytest

from tests.config.composing import composed
from tpu_experiments.config.schema import SweepingConfig
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.sweeping.pruning import Evaluations, no_pruning_reason, step_to_prune_at

OTHERS = [{10: 5.0, 20: 4.0}, {10: 4.0, 20: 3.0}, {10: 3.0, 20: 2.0}]


@pytest.mark.parametrize(
    ("own", "step"),
    [
        ({10: 4.0}, None),  # the median itself is not worse
        ({10: 4.5}, 10),
        ({10: 3.9, 20: 3.5}, 20),
        ({10: 2.5, 20: 9.0}, None),  # its best so far counts, not its latest
        ({15: 9.0}, None),  # nobody else was evaluated there
        ({}, None),
    ],
)
def test_a_point_worse_than_the_median_is_stopped(own: dict[int, float], step: int | None) -> None:
    assert step_to_prune_at(own, OTHERS, SweepingConfig()) == step


def test_it_waits_for_points_and_steps() -> None:
    bad = {10: 9.0, 20: 9.0}
    assert step_to_prune_at(bad, OTHERS[:2], SweepingConfig()) is None
    assert step_to_prune_at(bad, OTHERS[:2], SweepingConfig(prune_after_points=2)) == 10
    assert step_to_prune_at(bad, OTHERS, SweepingConfig(prune_after_steps=10)) == 20
    assert step_to_prune_at(bad, OTHERS, SweepingConfig(prune_after_steps=20)) is None


def test_it_decides_as_optuna_does() -> None:
    optuna = pytest.importorskip("optuna", reason="the extra optuna is not installed")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    drawn = random.Random(0)
    curves = [{step: drawn.uniform(1, 5) for step in (5, 10, 15)} for _ in range(30)]
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=6))
    settings = SweepingConfig(prune_after_points=4, prune_after_steps=5)
    decided = []
    for number, curve in enumerate(curves):
        trial, theirs = study.ask(), None
        for step, loss in curve.items():
            trial.report(loss, step)
            theirs = step if theirs is None and trial.should_prune() else theirs
        decided.append((theirs, step_to_prune_at(curve, curves[:number], settings)))
        study.tell(trial, statistics.fmean(curve.values()))
    assert {theirs for theirs, _ in decided} == {None, 10, 15}
    assert [theirs for theirs, _ in decided] == [ours for _, ours in decided]


def test_what_is_read_of_a_run_is_whole_lines_with_numbers(tmp_path: Path) -> None:
    known = Evaluations(RunFolder(str(tmp_path), "run"))
    known.refresh()
    assert known.losses == {}
    records = [
        {"step": 0, "eval/loss": 8.0},
        {"step": 5, "train/loss": 7.0},
        {"step": 5, "eval/loss": 7.5},
        {"step": 10, "eval/loss": None},
    ]
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 15, "eval/loss": 6.')
    known.refresh()
    assert known.losses == {5: 7.5}
    assert (known.last_step, known.last_train_loss) == (5, 7.0)
    file.write_text('{"step": 2, "eval/loss": 7.9}\n')  # it went on from an earlier checkpoint
    known.refresh()
    assert known.losses == {2: 7.9}
    damaged = ["[1]", "7", "[" * 100_000, '{"eval/loss": 1.0}', '{"step": "2", "eval/loss": 1.0}']
    file.write_text("".join(f"{line}\n" for line in (*damaged, '{"step": 3, "eval/loss": 7.0}')))
    known.refresh()
    assert known.losses == {3: 7.0}


def test_pruning_that_can_do_nothing_says_so() -> None:
    assert no_pruning_reason(composed("trainer.eval_every_steps=0")) is None
    median = "sweeping.prune=median"
    assert "trainer.eval_every_steps=0" in str(no_pruning_reason(composed(median, "trainer.eval_every_steps=0")))
    assert "add jsonl" in str(no_pruning_reason(composed(median, "trainer.eval_every_steps=5", "logger=console")))
    assert no_pruning_reason(composed(median, "trainer.eval_every_steps=5")) is None
