"""A run that goes on from a checkpoint ends with the same adapter bytes and the same logged losses."""

import shutil

import pytest

from tests.training.runs import finished, records

pytestmark = pytest.mark.xla
COMMON = (
    "model=qwen05b",
    "data=[sample_text,sample_chat]",
    "lora=all_linear_r8",
    "lora.dropout=0.1",
    "debug=smoke",
    "trainer.log_every_steps=1",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=100",
    "name=again",
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder and result of a run from start to end."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return folder, finished(*COMMON, output_dir=folder)


@pytest.mark.parametrize("step", [4, 6, 8], ids=["inside_stage_1", "at_the_border", "inside_stage_2"])
def test_resumed_run_equals_the_uninterrupted_one(uninterrupted, tmp_path, step):
    whole, first = uninterrupted
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "again"
    adapter = (folder / "adapter" / "adapter_model.safetensors").read_bytes()
    losses = {r["step"]: r["train/loss"] for r in records(tmp_path) if "train/loss" in r}
    (folder / "result.json").unlink()
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)
    second = finished(*COMMON, output_dir=tmp_path)
    assert (folder / "adapter" / "adapter_model.safetensors").read_bytes() == adapter
    assert {r["step"]: r["train/loss"] for r in records(tmp_path) if "train/loss" in r} == losses
    assert [s["steps"] for s in second["stages"]] == [s["steps"] for s in first["stages"]] == [6, 6]
    assert second["eval_loss"] == first["eval_loss"]
    assert second["eval_loss_before"] == first["eval_loss_before"]


def test_a_finished_run_is_not_run_again(uninterrupted):
    folder, first = uninterrupted
    before = (folder / "again" / "metrics.jsonl").read_bytes()
    assert finished(*COMMON, output_dir=folder) == first
    assert (folder / "again" / "metrics.jsonl").read_bytes() == before
