"""Steps that are not finite change nothing, on every runtime; and what the guard makes of the reports."""

import logging
import math

import pytest
import torch

from tests.checkpoint.saved import save_checkpoint
from tests.tiers import only
from tests.training.test_window import pending
from tests.training.tiny import ARCHITECTURES, Run, random_batch
from tpu_experiments.checkpoint.errors import TrainingStopped
from tpu_experiments.checkpoint.progress import Progress, StageRecord
from tpu_experiments.config.schema import GuardConfig
from tpu_experiments.objectives.next_token import next_token_loss
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.training import step as step_module
from tpu_experiments.training.guard import Guard
from tpu_experiments.training.meters import read_reports

TINY = ("model.size=tiny", "model.dtype=float32", "lora=all_linear_r8")
BAD_TOKEN = 3
"""A token that random batches do not have."""


def values_of(run: Run) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state on the host."""
    return {name: tensor.detach().cpu().clone() for name, tensor in run._held().items()}


def bad_loss(module, parameters, rows):
    """A row that begins with the bad token has an infinite loss; one that ends with it an infinite gradient alone."""
    sums, weights = next_token_loss(module, parameters, rows)
    first, last = rows["ids"][:, 0] == BAD_TOKEN, rows["ids"][:, -1] == BAD_TOKEN
    edge = (sums * 0 + (~last).float()).sqrt()  # the slope of a root is infinite at 0
    return sums * torch.where(first, torch.inf, 1.0) + edge - edge.detach(), weights


def with_bad_token(batch, place):
    ids = batch["ids"].clone()
    ids[0, 1, place] = BAD_TOKEN
    return batch | {"ids": ids}


@pytest.mark.xla
@pytest.mark.parametrize("runtime", ["eager", "xla"])
@pytest.mark.parametrize("place", [0, -1], ids=["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing(make_config, runtime, place):
    from tpu_experiments.runtime.xla.device import XlaRuntime

    config = make_config("model=qwen05b", *TINY, f"hw.runtime={runtime}")
    made = EagerRuntime(config.hw) if runtime == "eager" else XlaRuntime(config.hw, sharding=config.sharding)
    ours, expected = Run(config, made), Run(config, made)
    for run in (ours, expected):
        run.step.row_loss = bad_loss
    good = [random_batch(i, accumulation=2, rows=2, seq_len=24) for i in range(4)]
    ours.losses(good[:2])
    before = values_of(ours)
    bad = ours.program(made.put(with_bad_token(good[3], place), rows_dim=1))
    loss, norm = float(bad.loss.cpu()), float(bad.grad_norm.cpu())
    assert not (math.isfinite(loss) and math.isfinite(norm))
    assert math.isfinite(loss) == (place == -1)
    after = values_of(ours)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert float(after["/count"]) == 2
    assert ours.losses(good[2:3]) == expected.losses(good[:3])[2:]
    known = values_of(expected)
    assert all(torch.equal(value, known[name]) for name, value in values_of(ours).items())


@pytest.mark.xla
@pytest.mark.parametrize("model", only(["mistral7b"], ARCHITECTURES))
def test_finite_steps_are_bit_for_bit_those_without_a_guard(make_config, monkeypatch, model):
    from tpu_experiments.runtime.xla.device import XlaRuntime

    config = make_config(f"model={model}", *TINY)
    made = XlaRuntime(config.hw, sharding=config.sharding)
    batches = [random_batch(i, accumulation=2, rows=2, seq_len=48) for i in range(4)]
    guarded = Run(config, made)
    losses = guarded.losses(batches)
    monkeypatch.setattr(step_module, "select_where", lambda old, new, *, where: dict(new))
    plain = Run(config, made)
    compiles = made.counters().num_compiles
    assert plain.losses(batches) == losses
    assert made.counters().num_compiles == compiles + 1  # the program without a guard is another one
    known = values_of(plain)
    assert all(torch.equal(value, known[name]) for name, value in values_of(guarded).items())


def progress(step: int = 0) -> Progress:
    found = Progress(step=step, stage_step=step, stages=[StageRecord("text", tokens=1000)])
    found.guard.seen = step
    return found


def reading(first: int, *losses: float):
    return read_reports([pending(first + i, loss, [loss, 1.0]) for i, loss in enumerate(losses)])


def test_a_streak_that_continues_is_rolled_back_and_one_that_ended_is_not(caplog):
    guard, known = Guard(GuardConfig(max_skipped=2), process=(0, 1)), progress(9)
    for each in (reading(10, 2.0, math.nan, math.inf), reading(13, math.nan, math.nan, 2.0)):
        guard.observe(each, known)
        guard.decide(each, known.guard)
    assert guard.request is None
    assert (known.guard.streak, known.guard.skipped, known.guard.seen) == ([], 4, 15)
    assert known.stages[0].tokens == 1000 - 4 * 64
    assert "train loss is nan at step 11 (learning rate 0.001); rows (source:row): wiki:110" in caplog.text
    late = reading(16, math.nan, math.nan, math.nan)
    guard.observe(late, known)
    guard.decide(late, known.guard)
    assert guard.request is not None
    assert (guard.request.first, guard.request.bad, guard.request.last) == (15, 16, 18)


def test_steps_that_a_checkpoint_knows_are_not_counted_again():
    known, guard = progress(), Guard(GuardConfig(max_skipped=3), process=(0, 1))
    guard.observe(reading(1, 2.0, math.nan), known)
    resumed = Progress.from_dict(known.to_dict())
    assert resumed == known
    whole = reading(1, 2.0, math.nan, math.nan)
    Guard(GuardConfig(), process=(0, 1)).observe(whole, resumed)
    assert (resumed.guard.streak, resumed.guard.skipped) == ([2, 3], 2)


def test_a_second_streak_passes_over_a_step_that_was_trained_before_it():
    known, guard = progress(20), Guard(GuardConfig(max_skipped=0, before_steps=2), process=(0, 1))
    known.guard.passed_over = [[18, 20]]
    late = reading(21, math.nan)
    guard.observe(late, known)
    guard.decide(late, known.guard)
    assert guard.request is not None
    assert (guard.request.first, guard.request.last) == (16, 21)


def test_where_to_go_back_to(tmp_path):
    known, guard = progress(9), Guard(GuardConfig(max_skipped=0, max_rollbacks=1), process=(0, 1))
    late = reading(10, math.nan)
    guard.observe(late, known)
    guard.decide(late, known.guard)
    assert guard.request is not None
    with pytest.raises(TrainingStopped, match=r"at step 10 .* there is no checkpoint from before to go back to"):
        guard.checkpoint_step(guard.request, known.guard, folder=str(tmp_path))
    for step in (9, 10):  # 9 has the update that may have done it, and is better than none
        save_checkpoint(str(tmp_path), step=step, groups={}, progress={}, keep_last=9)
    assert guard.checkpoint_step(guard.request, known.guard, folder=str(tmp_path)) == 9
    save_checkpoint(str(tmp_path), step=8, groups={}, progress={}, keep_last=9)
    assert guard.checkpoint_step(guard.request, known.guard, folder=str(tmp_path)) == 8
    request = guard.request
    known.guard = guard.after_rollback(request, found=known.guard, before=known.guard)
    with pytest.raises(TrainingStopped, match=r"rolled back 1 times \(trainer.guard.max_rollbacks\)"):
        guard.checkpoint_step(request, known.guard, folder=str(tmp_path))


def test_stop_is_what_it_says():
    guard = Guard(GuardConfig(action="stop"), process=(0, 1))
    with pytest.raises(TrainingStopped, match=r"train loss is nan at step 2 .*rows \(source:row\): wiki:20;"):
        guard.observe(reading(1, 1.0, math.nan), progress())


@pytest.mark.parametrize("action", ["warn", "rollback"])
def test_a_loss_that_jumps(caplog, action):
    settings = GuardConfig(spike_factor=2.0, spike_window=4, spike_action=action)
    guard, known = Guard(settings, process=(0, 1)), progress()
    early = reading(1, 9.0, 2.0, 2.0, 2.2)  # no median yet
    calm = reading(5, 4.1, 2.0)
    jump = reading(7, 1.9, 6.6, 2.0)
    for each in (early, calm):
        guard.observe(each, known)
        guard.decide(each, known.guard)
    assert guard.request is None
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    guard.observe(jump, known)
    guard.decide(jump, known.guard)
    assert "train loss is 6.6000 at step 8, 3.1 times the median 2.1000 of the 4 steps before" in caplog.text
    assert "rows with the largest loss sums (source:row): wiki:80, wiki:81" in caplog.text
    assert (guard.request is not None) == (action == "rollback")
    if guard.request is not None:
        assert (guard.request.first, guard.request.bad, guard.request.last) == (7, 8, 8)
