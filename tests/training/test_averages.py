"""Averages in whole runs: evaluations and exports are of them, checkpoints of both, and a resume is exact."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.training.runs import finished, losses, run
from tpu_experiments.checkpoint.state import newest_parameters
from tpu_experiments.optim.ema import LAG

pytestmark = pytest.mark.xla
SMALL = (
    "lora=none",
    "trainer.seq_len=64",
    "trainer.global_batch_rows=8",
    "trainer.log_every_steps=1",
    "trainer.eval_every_steps=0",
    "trainer.max_eval_rows=64",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=9",
    "sample.max_new_tokens=0",
    "data=sample_text",
    "curriculum=single",
    "schedule=constant",
    "trainer.max_stage_steps=4",
)
KINDS = {"decay 0.9": ("optim.ema=0.9",), "schedule-free": ("optim=schedule_free_adamw",)}
EMA = KINDS["decay 0.9"]


def group(folder, step, name):
    return load_file(folder / "checkpoints" / f"step_{step:08d}" / f"{name}.safetensors")


def averages(folder, step):
    lags = group(folder, step, "optimizer")
    return {name: p + lags[f"{name}/{LAG}"] for name, p in group(folder, step, "parameters").items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_export_is_the_average_and_has_the_loss_that_the_run_reports(tmp_path, kind):
    result = finished(*SMALL, *KINDS[kind], "name=mine", output_dir=tmp_path)
    folder = tmp_path / "mine"
    assert result["num_compiles"] == result["expected_programs"] == 2
    assert result["compiles_after_warmup"] == 0
    assert result["proof"]["answer"]["equal_bits"]
    exported, expected = load_file(folder / "model" / "model.safetensors"), averages(folder, 4)
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    moved = group(folder, 4, "parameters")
    assert not any(torch.equal(exported[name], moved[name]) for name in moved)
    step, found = newest_parameters(str(folder / "checkpoints"), max_held_bytes=0)
    assert step == 4
    assert len(found) == len(expected)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert f"averaged over steps ({kind}), trained with" in (folder / "README.md").read_text()
    words = ("trainer.max_stage_steps=1", f"model.path={folder}/model", "hw.runtime=eager")
    again = finished(*SMALL, *words, "name=again", output_dir=tmp_path / "again")
    assert again["eval_loss_before"] == pytest.approx(result["eval_loss"], abs=1e-5)


@pytest.mark.slow
def test_training_is_the_same_without_it_and_the_next_run_starts_from_the_average(tmp_path):
    finished(*SMALL, *EMA, "hw.runtime=eager", "name=mine", output_dir=tmp_path / "a")
    plain = finished(*SMALL, "hw.runtime=eager", "name=mine", output_dir=tmp_path / "b")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    folder = tmp_path / "a" / "mine"
    assert group(folder, 4, "parameters").keys() == group(tmp_path / "b" / "mine", 4, "parameters").keys()
    begun = ("trainer.max_stage_steps=1", "optim.lr=1e-12", "checkpoint.every_steps=1")
    first = finished(*SMALL, "hw.runtime=eager", *begun, f"start.run={folder}", "name=next", output_dir=tmp_path / "c")
    for name, tensor in group(tmp_path / "c" / "next", 1, "parameters").items():
        torch.testing.assert_close(tensor, averages(folder, 4)[name], atol=1e-9, rtol=0)
    assert first["eval_loss_before"] != plain["eval_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [EMA, ("optim=schedule_free_adamw",), ("optim=muon",)], ids=["ema", "free", "muon"])
def test_a_run_is_killed_resumed_and_equal(tmp_path, more):
    words = ("experiment=llama_mini_pretrain", "debug=smoke", "task=resume_check", "hw.runtime=eager", "name=mine")
    done = run(*words, *more, "sample.max_new_tokens=0", output_dir=tmp_path, as_typed=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "resume_check" / "mine" / "resume_check.json").read_text())["equal"]
