"""A resume in mid-stage keeps all that a step reads: averages, the moments of a fresh optimizer, torch's seed."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.tiers import only
from tests.training.runs import finished
from tpu_experiments.optim.ema import LAG

STAGED = (
    "lora=all_linear_r8",
    "data=[sample_text,sample_chat]",
    "hw.runtime=eager",
    "trainer.max_stage_steps=4",
    "trainer.seq_len=64",
    "trainer.global_batch_rows=4",
    "trainer.eval_every_steps=0",
    "trainer.max_eval_rows=4",
    "sample.max_new_tokens=0",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=9",
    "curriculum.stages.chat.optimizer=fresh",
    "name=staged",
)
KINDS = {
    "ema": ("optim.ema=0.9",),
    "schedule-free": ("optim=schedule_free_adamw", "curriculum.stages.chat.schedule.warmup_steps=1"),
    "muon": ("optim=muon",),
}
NOTED = """
import json

import torch

from tpu_experiments.training.trainer import Trainer


class Noted(Trainer):
    def queue_step(self, info, batch):
        super().queue_step(info, batch)
        with open({file!r}, "a") as file:
            file.write(json.dumps([self.progress.step, torch.initial_seed()]) + "\\n")
"""


@pytest.mark.parametrize("kind", only(["schedule-free"], KINDS))
def test_a_resume_in_mid_stage_has_the_averages_the_moments_and_the_seeds_of_the_whole_run(tmp_path, monkeypatch, kind):
    seeds = tmp_path / "seeds.jsonl"
    (tmp_path / "noted_lab.py").write_text(NOTED.format(file=str(seeds)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = (*STAGED, *KINDS[kind], "plugins=[noted_lab]", "trainer._target_=noted_lab.Noted")
    finished(*words, output_dir=tmp_path / "out")
    folder = tmp_path / "out" / "staged"
    last = folder / "checkpoints" / "step_00000008"
    whole = {path.name: path.read_bytes() for path in last.glob("*.safetensors")}
    assert set(whole) == {"optimizer.safetensors", "parameters.safetensors"}
    first = dict(map(json.loads, seeds.read_text().splitlines()))
    assert list(first) == list(range(1, 9))
    assert len(set(first.values())) == 8, "each step draws anew"
    (folder / "result.json").unlink()
    shutil.rmtree(last)
    seeds.unlink()
    finished(*words, output_dir=tmp_path / "out")
    assert list(map(json.loads, seeds.read_text().splitlines())) == [[step, first[step]] for step in (7, 8)]
    assert {path.name: path.read_bytes() for path in last.glob("*.safetensors")} == whole


def test_a_fresh_schedule_free_optimizer_begins_at_the_average(tmp_path):
    """Steps of 1e-12 in the second stage leave the parameters, and their average, at the average of the first."""
    words = (*STAGED, *KINDS["schedule-free"], "curriculum.stages.chat.lr=1e-12")
    finished(*words, output_dir=tmp_path)

    def group(step, name):
        return load_file(tmp_path / "staged" / "checkpoints" / f"step_{step:08d}" / f"{name}.safetensors")

    before, lags, after = group(4, "parameters"), group(4, "optimizer"), group(6, "parameters")
    assert sum(float(lags[f"{name}/{LAG}"].abs().max()) > 1e-6 for name in before) > len(before) / 2
    for name, p in before.items():
        torch.testing.assert_close(after[name], p + lags[f"{name}/{LAG}"], atol=1e-9, rtol=0)


OF_VOCABULARY = (
    "model=mistral7b",
    "debug=smoke",
    "lora=all_linear_r8",
    "lora.targets=[q_proj,up_proj,embed_tokens]",
    "+lora.rank_pattern={q_proj: 3, embed_tokens: 2}",
    "+lora.alpha_pattern={layers.0.mlp.up_proj: 4}",
    "lora.modules_to_save=[norm]",
    "+lora.trainable_token_indices={lm_head: [5, 9, 300]}",
    "data=[sample_text]",
    "trainer.max_stage_steps=4",
    "trainer.eval_every_steps=2",
    "trainer.max_eval_rows=4",
    "sample.max_new_tokens=0",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=9",
    "name=vocabulary",
)


@pytest.mark.xla
def test_a_resume_has_the_patterns_the_modules_and_the_rows_of_the_whole_run(tmp_path):
    finished(*OF_VOCABULARY, output_dir=tmp_path)
    folder = tmp_path / "vocabulary"
    last, adapter = folder / "checkpoints" / "step_00000004", folder / "adapter" / "adapter_model.safetensors"
    files = [*last.glob("*.safetensors"), adapter]
    whole = {path: path.read_bytes() for path in files}
    assert len(whole) == 3
    parts = {name.rpartition(".")[2] for name in load_file(last / "parameters.safetensors")}
    assert {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "trainable_tokens_delta", "weight"} == parts
    for path in (folder / "result.json", adapter):
        path.unlink()
    shutil.rmtree(last)
    finished(*OF_VOCABULARY, output_dir=tmp_path)
    assert {path: path.read_bytes() for path in files} == whole
