"""A run that goes on from a checkpoint ends with the same adapter bytes and the same logged losses."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.tiers import only
from tests.training.runs import finished, records, run

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


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    only(["4"], [4, 6, 8]),
    ids=["inside_stage_1", "at_the_border", "inside_stage_2"],
)
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


@pytest.mark.slow
def test_moments_of_8_bits_resume_bit_for_bit(tmp_path):
    """Codes and scales lie in the checkpoint by the names of single layers; all bytes are as without the break."""
    words = ("model=qwen05b", "data=[sample_text]", "lora=all_linear_r8", "lora.r=64", "optim=adamw8bit", "debug=smoke")
    words += ("optim.b_lr_ratio=4", "trainer.log_every_steps=1", "checkpoint.every_steps=2", "checkpoint.keep_last=100")
    words += ("curriculum.stages.text.steps=6", "name=again")
    result = finished(*words, output_dir=tmp_path)
    assert (result["num_compiles"], result["compiles_after_warmup"]) == (result["expected_programs"], 0)
    folder = tmp_path / "again"
    last = sorted(folder.glob("checkpoints/step_*"))[-1]
    before = {path.name: path.read_bytes() for path in last.glob("*.safetensors")}
    losses = {r["step"]: r["train/loss"] for r in records(tmp_path) if "train/loss" in r}
    state = load_file(last / "optimizer.safetensors")
    name = "model.layers.1.mlp.up_proj.lora_B/first"
    assert (state[name].dtype, state[name].shape) == (torch.uint8, (128, 64))
    assert (state[f"{name}_absmax"].dtype, state[f"{name}_absmax"].shape) == (torch.float32, (32,))
    (folder / "result.json").unlink()
    for checkpoint in folder.glob("checkpoints/step_*"):
        if int(checkpoint.name.removeprefix("step_")) > 2:
            shutil.rmtree(checkpoint)
    finished(*words, output_dir=tmp_path)
    assert {path.name: path.read_bytes() for path in last.glob("*.safetensors")} == before
    assert {r["step"]: r["train/loss"] for r in records(tmp_path) if "train/loss" in r} == losses
    assert len(losses) == 6


@pytest.mark.slow
@pytest.mark.parametrize("variant", [("lora.dora=true",), ("lora.dora=true", "lora.init=loftq", "model.base=nf4")])
def test_variants_of_adapters_resume_with_the_same_bytes(tmp_path, variant):
    """A finished run without its last checkpoints and its result; its export is for the base without anything taken."""
    command = (*COMMON, *variant, "data=[sample_text]")
    first = finished(*command, output_dir=tmp_path)
    assert first["proof"]["trained"]["with_effect"] == first["proof"]["trained"]["modules"] > 0
    folder = tmp_path / "again"
    adapter = (folder / "adapter" / "adapter_model.safetensors").read_bytes()
    losses = {r["step"]: r["train/loss"] for r in records(tmp_path) if "train/loss" in r}
    (folder / "result.json").unlink()
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step_")) > 2:
            shutil.rmtree(checkpoint)
    second = finished(*command, output_dir=tmp_path)
    assert (folder / "adapter" / "adapter_model.safetensors").read_bytes() == adapter
    assert {r["step"]: r["train/loss"] for r in records(tmp_path) if "train/loss" in r} == losses
    assert second["eval_loss"] == first["eval_loss"]
    settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (settings["use_dora"], settings["r"], settings["init_lora_weights"]) == (True, 8, True)


def test_a_finished_run_is_not_run_again(uninterrupted):
    folder, first = uninterrupted
    before = (folder / "again" / "metrics.jsonl").read_bytes()
    assert finished(*COMMON, output_dir=folder) == first
    assert (folder / "again" / "metrics.jsonl").read_bytes() == before


def test_every_save_of_it_is_proven(uninterrupted):
    """The first and those that end a stage by the answer of evaluation's program too, and so is the export."""
    folder, result = uninterrupted
    manifests = {p.parent.name: json.loads(p.read_text()) for p in folder.glob("again/checkpoints/*/COMMIT.json")}
    proofs = {int(name.removeprefix("step_")): manifest["proof"] for name, manifest in manifests.items()}
    assert sorted(proofs) == [2, 4, 6, 8, 10, 12]
    assert [step for step in sorted(proofs) if proofs[step].get("answer", {}).get("equal_bits")] == [2, 6, 12]
    for proof in [*proofs.values(), result["proof"]]:
        trained = proof["trained"]
        assert trained["changed"] == trained["tensors"] > 0
        assert trained["with_effect"] == trained["modules"] > 0
    assert result["proof"]["answer"]["equal_bits"]
    assert result["proof"]["answer"]["loss"] == proofs[12]["answer"]["loss"]
    assert result["num_compiles"] == result["expected_programs"] == 3
    assert result["compiles_after_warmup"] == 0


FROZEN = """
from tpu_experiments.optim.adamw import AdamW
from tpu_experiments.training.trainer import Trainer


class Still(AdamW):
    def update(self, parameters, grads, state, *, lr, decay):
        return dict(parameters), state


class Frozen(Trainer):
    def build_optimizer(self):
        return Still(beta1=0.9, beta2=0.95, eps=1e-8)
"""


def test_a_run_that_would_save_an_untrained_adapter_stops(tmp_path):
    (tmp_path / "frozen_lab.py").write_text(FROZEN)
    own = ("plugins=[frozen_lab]", "trainer._target_=frozen_lab.Frozen", "hw.runtime=eager", "sample.max_new_tokens=0")
    done = run(*COMMON, *own, output_dir=tmp_path / "out", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1, done.stdout + done.stderr
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (
        "stopped instead of saving: every one of the 28 trained tensors has its initial value after 2 steps" in message
    )
    assert not list((tmp_path / "out").glob("again/checkpoints/*/COMMIT.json"))
    assert not (tmp_path / "out" / "again" / "adapter").exists()
