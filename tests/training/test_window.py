"""Reports read at log steps: means, and the rows that made a loss not finite; a run that diverges stops."""

import math
from dataclasses import replace

import pytest
import torch

from tests.training.runs import run
from tpu_experiments.training.meters import Pending, Window
from tpu_experiments.training.step import StepOutput


def pending(step: int, loss: float, rows: list[float], *, reported: list[float] | None = None) -> Pending:
    labels = [f"wiki:{i + 10 * step}" for i in range(len(rows))]
    output = StepOutput(torch.tensor(loss), torch.tensor(0.5), torch.tensor([rows]), torch.tensor(8.0))
    output.reported = None if reported is None else torch.tensor(reported)
    return Pending(step, 1e-3, labels, 64, output)


def test_reading_is_the_mean_of_its_steps():
    window = Window()
    window.read([pending(1, 3.0, [1.0, 2.0]), pending(2, 1.0, [0.5, 0.5])])
    (reading,) = window.drain()
    assert (reading.step, reading.mean_loss, reading.num_tokens) == (2, 2.0, 128)
    assert reading.losses == [(1, 3.0), (2, 1.0)]
    assert window.drain() == []


def test_a_record_that_a_checkpoint_cut_in_two_is_the_mean_of_both_parts():
    before, whole, after = Window(), Window(), Window()
    steps = [pending(i, 1.0 + i / 3, [1.0, 2.0]) for i in range(1, 6)]
    before.pending = steps[:2]
    after.carry(*before.open())
    whole.read(steps)
    after.read(steps[2:])
    (expected,), (ours,) = whole.drain(), after.drain()
    assert (ours.losses, ours.mean_loss) == (expected.losses, expected.mean_loss)
    assert ours.supervised == expected.supervised == [8.0] * 5
    assert (ours.num_steps, ours.num_tokens, expected.num_steps) == (3, 192, 5)
    assert after.carried == []


def test_what_an_objective_reports_is_of_both_parts_too():
    steps = [pending(i, 1.0, [1.0], reported=[0.1 * i, 2.0]) for i in range(1, 6)]
    whole, first, second, third = Window(), Window(), Window(), Window()
    whole.read(steps)
    first.pending = steps[:2]
    second.carry(*first.open())
    assert second.open() == first.open()
    second.pending = steps[2:4]
    third.carry(*second.open())
    third.read(steps[4:])
    (expected,), (ours,) = whole.drain(), third.drain()
    assert ours.reported_sums == expected.reported_sums
    assert len(ours.reported) == 5
    unknown = Window()
    unknown.carry(*first.open()[:2])  # of a checkpoint that has none
    unknown.read(steps[2:])
    assert unknown.drain()[0].reported_sums == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_steps_that_are_not_finite_are_kept_apart_with_their_rows(bad):
    window = Window()
    window.read([pending(1, 3.0, [1.0, 2.0]), pending(2, bad, [0.5, bad]), pending(3, math.nan, [math.nan] * 2)])
    (reading,) = window.drain()
    assert [(each.step, each.rows) for each in reading.skipped] == [(2, ["wiki:21"]), (3, ["wiki:30", "wiki:31"])]
    assert (reading.losses, reading.num_steps, reading.mean_loss, reading.grad_norm) == ([(1, 3.0)], 3, 3.0, 0.5)


def test_a_gradient_that_is_not_finite_is_kept_apart_too():
    window = Window()
    bad = pending(4, 2.0, [1.0, 2.0])
    bad.output.grad_norm.fill_(math.inf)
    window.read([bad])
    (reading,) = window.drain()
    assert [(each.step, each.loss, each.rows) for each in reading.skipped] == [(4, 2.0, [])]
    assert math.isnan(reading.mean_loss)


@pytest.mark.xla
def test_a_run_that_diverges_stops_and_names_rows(tmp_path):
    overrides = ("model=qwen05b", "debug=smoke", "optim.lr=1e30", "optim.clip_norm=null", "trainer.log_every_steps=3")
    done = run(*overrides, output_dir=tmp_path)
    assert done.returncode == 1, done.stderr
    message = next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "train loss is nan at step" in message or "train loss is inf at step" in message
    assert "sample_text:" in message
    assert "there is no checkpoint from before to go back to" in message
    assert not list(tmp_path.glob("*/result.json"))


def test_pairs_are_counted_beside_their_learnt_tokens():
    """The loss is a mean over 8 pairs, which the device counts; skipped steps count nothing."""
    window = Window()
    steps = [replace(pending(step, loss, [1.0]), examples=(300 * step, 8)) for step, loss in ((1, 1.0), (2, math.nan))]
    window.read(steps)
    (reading,) = window.drain()
    assert (reading.num_supervised, reading.num_examples, reading.supervised) == (300.0, 8, [8.0])
