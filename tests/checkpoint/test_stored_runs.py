"""Run folders that an earlier version of this program wrote go on, to the weights that it ended with.

tests/golden/runs holds two runs of eight steps as they were after four, an adapter and a whole model, and their
prepared data. They were written on 2026-11-24, before the packages io and logging became storage and loggers. A
processor of another make sums in another order, so the weights are not compared byte by byte but by two sums over them,
to 1e-4; a step changes those by 2e-3 or more (and ends in other bytes on an AMD processor than on an Intel). A version
that cannot read them has to say so in a sentence, and gets runs of its own beside these.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import forks

REPOSITORY = Path(__file__).parents[2]
RUNS = REPOSITORY / "tests" / "golden" / "runs"
COMMAND = [
    "model=tiny",
    "model.init=random",
    "model.arch.hidden_size=32",
    "model.arch.intermediate_size=64",
    "model.arch.num_hidden_layers=2",
    "model.arch.num_attention_heads=2",
    "model.arch.num_key_value_heads=1",
    "model.arch.head_dim=16",
    "data=sample_text",
    "curriculum=single",
    "hw.runtime=eager",
    "hw.num_threads=1",
    "trainer.seq_len=64",
    "trainer.global_batch_rows=4",
    "trainer.max_stage_steps=8",
    "checkpoint.every_steps=4",
    "checkpoint.keep_last=5",
    "sample.max_new_tokens=0",
]
KINDS = {
    "adapter": (
        ("lora.r=2", "lora.targets=[q_proj,v_proj]"),
        "adapter/adapter_model.safetensors",
        (23.98405842932698, 49.83392055685135),
    ),
    "model": (
        ("lora=none",),
        "model/model.safetensors",
        (2878.492068922389, 3799.516173472674),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_run_resumes_to_the_weights_it_ended_with(kind: str, tmp_path: Path) -> None:
    words, exported, sums = KINDS[kind]
    shutil.copytree(RUNS / kind, tmp_path / kind)
    shutil.copytree(RUNS / "prepared", tmp_path / "prepared")
    command = ["run.py", *COMMAND, *words, f"name={kind}", f"output_dir={tmp_path}"]
    done = forks.run(command)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "resumed at step 4" in done.stdout + done.stderr
    result = json.loads((tmp_path / kind / "result.json").read_text())
    assert result["status"] == "finished"
    names = {place.name for place in (RUNS / "prepared").iterdir()}
    assert {place.name for place in (tmp_path / "prepared").iterdir()} == names, "the prepared data was not read"
    assert sums_of(tmp_path / kind / exported) == pytest.approx(sums, rel=1e-4)


def sums_of(file: Path) -> tuple[float, float]:
    """Sum of the absolute weights, and with the place of each as a factor."""
    sizes = [tensor.double().abs().flatten() for _, tensor in sorted(load_file(file).items())]
    places = [torch.arange(1, len(size) + 1) / len(size) * number for number, size in enumerate(sizes, start=1)]
    return float(sum(s.sum() for s in sizes)), float(sum((s * p).sum() for s, p in zip(sizes, places, strict=True)))
