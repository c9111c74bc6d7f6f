"""Whole runs with rows whose loss is infinite or jumps: what is left out, gone back to, passed over, and resumed.

The trainer is one of a user's own: rows that begin with tokens that it is told have their loss multiplied.
"""

import json
import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.config.composing import composed
from tests.training.runs import records, run
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.tasks.setup import make_inputs
from tpu_experiments.training.batches import stage_rows

pytestmark = pytest.mark.xla
TRAINER = """
import torch

from tpu_experiments.training.trainer import Trainer


class TroubledTrainer(Trainer):
    def row_loss(self, module, parameters, rows):
        sums, weights = super().row_loss(module, parameters, rows)
        options = self.config.trainer.options
        for tokens in options["rows"]:
            is_it = torch.ones_like(sums, dtype=torch.bool)
            for place, token in enumerate(tokens):
                is_it = is_it & (rows["ids"][:, place] == token)
            sums = sums * torch.where(is_it, float(options["factor"]), 1.0)
        return sums, weights
"""
COMMON = (
    "model=qwen05b",
    "data=[sample_text,sample_chat]",
    "lora=all_linear_r8",
    "lora.dropout=0.1",
    "debug=smoke",
    "logger=[jsonl,tensorboard]",
    "trainer.log_every_steps=1",
    "trainer.max_eval_rows=8",
    "sample.max_new_tokens=0",
    "schedule=linear",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=100",
    "plugins=[my_trainer]",
    "trainer._target_=my_trainer.TroubledTrainer",
    "trainer.guard.max_skipped=1",
    "name=troubled",
)
NUM_TOKENS = 12
"""Of a row's beginning, which no other row has."""
MODES = {
    "eager_2": ("hw.runtime=eager", "hw.parallel=spawn", "hw.num_devices=2"),
    "spmd_2": ("hw.parallel=spmd", "hw.num_devices=2"),
}


@pytest.fixture(scope="module")
def trouble(tmp_path_factory):
    """`overrides(factor, steps)` for a run whose first row of each of these steps is troubled, and that row's label."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "my_trainer.py").write_text(TRAINER)
    common = (*COMMON, f"prepare.folder={folder / 'data'}")
    config = composed(*COMMON[:-4], f"prepare.folder={folder / 'data'}", f"output_dir={folder}")
    inputs = make_inputs(config, resolve_stages(config))
    rows = [stage_rows(inputs, stage, config=config) for stage in inputs.stages]

    def overrides(factor: str, *steps: int) -> tuple[list[str], list[str]]:
        tokens, labels = [], []
        for step in steps:
            stage, index = divmod(step - 1, 6)
            batch = rows[stage].batch(index, global_rows=8)
            tokens.append(batch.ids_GT[0, :NUM_TOKENS].tolist())
            labels.append(batch.labels[0])
        return [*common, f"+trainer.options.factor={factor}", f"+trainer.options.rows={tokens}"], labels

    return overrides


@pytest.fixture(scope="module")
def path_to_trainer(trouble, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    (folder / "my_trainer.py").write_text(TRAINER)
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def rolled_back(trouble, path_to_trainer, tmp_path_factory):
    """A run with one bad row in step 3, and in steps 8 and 9: one step in a row may be left out, so it goes back."""
    folder = tmp_path_factory.mktemp("rolled_back")
    overrides, labels = trouble("inf", 3, 8, 9)
    done = run(*overrides, output_dir=folder, env=path_to_trainer)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, overrides, labels


def losses(folder: Path) -> dict[int, float | None]:
    """Loss by step; fails on a step that is there twice."""
    found = [(r["step"], r.get("train/loss")) for r in records(folder) if "train/lr" in r]
    assert len({step for step, _ in found}) == len(found)
    return dict(found)


def test_bad_steps_are_left_out_and_a_streak_is_passed_over(rolled_back):
    folder, _, labels = rolled_back
    result = json.loads((folder / "troubled" / "result.json").read_text())
    assert result["guard"] == {"skipped": 1, "rollbacks": 1, "passed_over": [[7, 9]]}
    assert [stage["steps"] for stage in result["stages"]] == [6, 6]
    goodput = result["goodput"]["run"]
    assert goodput["lost_steps"] >= 3  # from step 7 on, up to where the loop was when it heard of step 9
    assert goodput["seconds"]["lost"] > 0
    assert sum(goodput["seconds"].values()) == pytest.approx(goodput["wall_seconds"])
    assert result["num_compiles"] == result["expected_programs"]
    assert result["compiles_after_warmup"] == 0
    ours = losses(folder)
    assert list(ours) == [1, 2, 3, 4, 5, 6, 10, 11, 12]
    assert [step for step, loss in ours.items() if loss is None] == [3]
    log = (folder / "troubled" / "run.log").read_text()
    for step, label in zip((3, 8, 9), labels, strict=True):
        assert f"train loss is inf at step {step} " in log
        assert f"rows (source:row): {label}; its update was skipped" in log
    assert "rolled back to step 6; steps 7 to 9 are skipped" in log


def test_the_learning_rate_is_that_of_the_position(rolled_back):
    folder, _, _ = rolled_back
    rates = {r["step"]: r["train/lr"] for r in records(folder) if "train/lr" in r}
    assert rates[10] == pytest.approx(rates[4])  # each stage has six steps of one schedule
    assert rates[12] == pytest.approx(rates[6])


def test_tensorboard_shows_one_curve(rolled_back):
    folder, _, _ = rolled_back
    events = EventAccumulator(str(folder / "troubled" / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("train/lr")] == [1, 2, 3, 4, 5, 6, 10, 11, 12]
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 4, 5, 6, 10, 11, 12]


@pytest.mark.slow
@pytest.mark.parametrize("step", [6, 10], ids=["before_the_next_checkpoint", "after_it"])
def test_a_run_killed_after_a_rollback_resumes_in_the_same_way(rolled_back, path_to_trainer, tmp_path, step):
    whole, overrides, _ = rolled_back
    shutil.copytree(whole / "troubled", tmp_path / "troubled")
    folder = tmp_path / "troubled"
    adapter = (folder / "adapter" / "adapter_model.safetensors").read_bytes()
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "adapter")
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)
    done = run(*overrides, output_dir=tmp_path, env=path_to_trainer)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "adapter" / "adapter_model.safetensors").read_bytes() == adapter
    assert losses(tmp_path) == losses(whole)
    result = json.loads((folder / "result.json").read_text())
    assert result["guard"] == {"skipped": 1, "rollbacks": 1, "passed_over": [[7, 9]]}


@pytest.mark.slow
def test_several_devices_go_back_together(rolled_back, path_to_trainer, tmp_path):
    """Processes that each read their own reports, and devices of one program: compared with one another."""
    found = []
    for name, mode in MODES.items():
        done = run(*rolled_back[1], *mode, output_dir=tmp_path / name, env=path_to_trainer)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(losses(tmp_path / name))
    one, other = found
    assert list(one) == list(other) == [1, 2, 3, 4, 5, 6, 10, 11, 12]
    assert all(one[step] == pytest.approx(other[step], abs=1e-5) for step in one if step != 3)
    assert one[3] is other[3] is None


@pytest.mark.slow
def test_a_loss_that_jumps_is_passed_over_and_too_many_rollbacks_end_the_run(trouble, path_to_trainer, tmp_path):
    spikes = (
        "trainer.guard={spike_factor:1.5,spike_window:3,spike_action:rollback,max_rollbacks:1}",
        "hw.runtime=eager",
    )
    overrides, (first, second) = trouble("40", 5, 11)
    done = run(*overrides, *spikes, output_dir=tmp_path, env=path_to_trainer)
    assert done.returncode == 1, done.stdout + done.stderr
    assert list(losses(tmp_path))[:4] == [1, 2, 3, 6]
    assert "rolled back to step 2; steps 4 to 5 are skipped" in done.stderr
    message = next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "at step 11, " in message
    assert second in message
    assert "rolled back 1 times (trainer.guard.max_rollbacks)" in message
    assert first in (tmp_path / "troubled" / "run.log").read_text()
