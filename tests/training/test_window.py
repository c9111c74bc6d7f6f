"""Reports read at log steps: means, and the rows that made a loss not finite."""

import math

import pytest
import torch

from tests.training.runs import run
from tpu_experiments.training.step import StepOutput
from tpu_experiments.training.window import Pending, TrainingStopped, Window


def pending(step: int, loss: float, rows: list[float]) -> Pending:
    labels = [f"wiki:{i + 10 * step}" for i in range(len(rows))]
    output = StepOutput(torch.tensor(loss), torch.tensor(0.5), torch.tensor([rows]), torch.tensor(8.0))
    return Pending(step, 1e-3, labels, 64, output)


def test_reading_is_the_mean_of_its_steps():
    window = Window()
    window.read([pending(1, 3.0, [1.0, 2.0]), pending(2, 1.0, [0.5, 0.5])])
    (reading,) = window.drain()
    assert (reading.step, reading.mean_loss, reading.num_tokens) == (2, 2.0, 128)
    assert reading.losses == [(1, 3.0), (2, 1.0)]
    assert window.drain() == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_first_step_that_is_not_finite_names_its_rows(bad):
    window = Window()
    window.read([pending(1, 3.0, [1.0, 2.0]), pending(2, bad, [0.5, bad]), pending(3, math.nan, [math.nan] * 2)])
    with pytest.raises(TrainingStopped, match=r"at step 2 .*rows \(source:row\): wiki:21;"):
        window.drain()


def test_rows_that_are_finite_by_themselves_point_at_the_parameters():
    window = Window()
    window.read([pending(4, math.nan, [1.0, 2.0])])
    with pytest.raises(TrainingStopped, match="the parameters were not finite before"):
        window.drain()


@pytest.mark.xla
def test_a_run_that_diverges_stops_and_names_rows(tmp_path):
    overrides = ("model=qwen05b", "debug=smoke", "optim.lr=1e30", "optim.clip_norm=null", "trainer.log_every_steps=3")
    done = run(*overrides, output_dir=tmp_path)
    assert done.returncode == 1, done.stderr
    message = next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "train loss is nan at step" in message or "train loss is inf at step" in message
    assert "sample_text:" in message
    assert not list(tmp_path.glob("*/result.json"))
