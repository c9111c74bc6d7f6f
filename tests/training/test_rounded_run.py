"""A run with rounded weights: three programs, resumed exactly, its integers read by transformers as they are."""

import json
from pathlib import Path

import pytest
import torch

from tests import forks
from tests.training.runs import SAME_SUMS, finished
from tpu_experiments.storage.tensors import tensors_in

pytestmark = [pytest.mark.xla, pytest.mark.slow]
WORDS = (
    "experiment=lr_qat",
    "debug=smoke",
    "model.linear_group=32",
    "model.linear_activations=int8",
    "lora.alpha=32",
    "optim.lr=1e-2",
    "trainer.log_every_steps=2",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("rounded")
    result = finished(*WORDS, output_dir=place, as_typed=True)
    assert result["num_compiles"] == result["expected_programs"] == 3
    assert result["compiles_after_warmup"] == 0
    return place / str(result["name"])


def test_its_integers_are_read_by_transformers(folder: Path) -> None:
    words = ["run.py", "task=export", f"task.run={folder}"]
    done = forks.run([*words, f"output_dir={folder.parent}"], env=SAME_SUMS)
    assert done.returncode == 0, done.stdout + done.stderr
    place = folder / "export" / "lr_qat"
    card = (folder / "adapter" / "README.md").read_text()
    assert f"task=export task.run={folder}" in card
    assert "PeftModel" not in card
    (parity,) = json.loads((place / "parity.json").read_text())
    assert parity["verdict"] == "ok"
    assert parity["max_log_prob_diff"] < 1e-5
    how = json.loads((place / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert (how["weights"]["num_bits"], how["weights"]["group_size"]) == (4, 32)
    assert (how["input_activations"]["strategy"], how["format"]) == ("token", "pack-quantized")
    tensors = tensors_in(bytearray((place / "model.safetensors").read_bytes()))
    packed = tensors["model.layers.0.mlp.up_proj.weight_packed"]
    assert (packed.dtype, tuple(packed.shape)) == (torch.int32, (128, 64 // 8))
    again = [forks.run([*words, f"task.forms=[{form}]"], env=SAME_SUMS) for form in ("gguf", "peft")]
    assert [run.returncode for run in again] == [2, 2]
    assert "task.forms has peft" in again[1].stderr
    assert "its adapter decides how weights are rounded to integers: name lr_qat or merged" in again[0].stderr
    quantised = forks.run(["run.py", "task=quantize", f"task.run={folder}"], env=SAME_SUMS)
    assert quantised.returncode == 2
    assert "whose weights are quantised already; write them with task=export 'task.forms=[lr_qat]'" in quantised.stderr


def test_it_is_evaluated_beside_the_weights_that_it_began_with(folder: Path) -> None:
    done = forks.run(["run.py", "task=evaluate", f"task.run={folder}", f"output_dir={folder.parent}"], env=SAME_SUMS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test split, rounded base model -> adapter" in done.stdout


def test_it_resumes_exactly(tmp_path: Path) -> None:
    done = forks.run(["run.py", *WORDS, "task=resume_check", f"output_dir={tmp_path}"], env=SAME_SUMS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_another_grid_does_not_continue_it(folder: Path) -> None:
    words = [word for word in WORDS if "group" not in word]
    start = [f"start.run={folder}", f"output_dir={folder.parent}", "name=other"]
    done = forks.run(["run.py", *words, *start], env=SAME_SUMS)
    assert done.returncode == 2
    assert "it was trained with model.linear_group=32, now 0" in done.stderr
