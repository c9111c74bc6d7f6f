"""Losses of all weights from scratch against transformers' Trainer: rows, start, decay groups, schedule, clip alike."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training.runs import REPOSITORY, finished
from tests.training.tiny import Run, configured
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.optim.base import own_ndim
from tpu_experiments.optim.schedules import multiplier
from tpu_experiments.runtime.eager import EagerRuntime

ROWS, SEQ_LEN = 4, 64
LR, WEIGHT_DECAY, BETAS, EPS, CLIP, FLOOR = 3e-3, 0.1, (0.9, 0.95), 1e-8, 1.0, 0.1


def warmup_of(num_steps: int) -> int:
    """Steps of warm-up, before the peak."""
    return num_steps // 10 + 1


def rows_of(num_steps: int) -> torch.Tensor:
    """Rows of the shipped text, (steps, ROWS, SEQ_LEN); they begin anew where it ends."""
    tokenizer = load_tokenizer("tpu_experiments/samples/tokenizer", revision=None, chat_template_path=None)
    lines = (REPOSITORY / "tpu_experiments/samples/wiki_ro.jsonl").read_text(encoding="utf-8").splitlines()
    ids = torch.tensor([i for line in lines for i in tokenizer(json.loads(line)["text"])["input_ids"]])
    needed = num_steps * ROWS * SEQ_LEN
    return ids.repeat(needed // len(ids) + 1)[:needed].view(num_steps, ROWS, SEQ_LEN)


def batch_of(rows: torch.Tensor, *, lr: float) -> dict[str, torch.Tensor]:
    """The rows of a step in two micro-batches, one document each, every token learnt."""
    ids = rows.view(2, ROWS // 2, SEQ_LEN).int()
    ones = torch.ones_like(ids)
    positions = torch.arange(SEQ_LEN, dtype=torch.int32).expand_as(ids)
    return {"ids": ids, "learn": ones, "positions": positions, "segments": ones, "lr": torch.tensor([lr])}


@pytest.mark.xla
@pytest.mark.parametrize("num_steps", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_every_step_has_the_loss_of_the_trainer(make_config, tmp_path: Path, num_steps: int) -> None:
    config = make_config(
        "experiment=llama_mini_pretrain",
        "model.size=tiny",
        "model.dtype=float32",
        "optim.no_decay=[]",  # the Trainer's groups let embeddings decay
        f"optim.weight_decay={WEIGHT_DECAY}",
        f"schedule.warmup_steps={warmup_of(num_steps)}",
        "hw=cpu",
        "hw.runtime=eager",
    )
    run = Run(config, EagerRuntime(config.hw), updates=configured(config))
    decaying = sorted(name for name, p in run.parameters.items() if own_ndim(name, p) > 1)
    rows = rows_of(num_steps)
    (tmp_path / "rows.json").write_text(json.dumps(rows.flatten(0, 1).tolist()))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(run.model.source.config, dtype=torch.float32)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in run.parameters.items():
            named[name].copy_(value)
    model.save_pretrained(tmp_path)
    schedule = config.schedule
    assert (schedule.name, schedule.floor) == ("cosine", FLOOR)
    lrs = [LR * multiplier(schedule, step=step, num_steps=num_steps) for step in range(num_steps)]
    ours = run.losses([batch_of(rows[step], lr=lr) for step, lr in enumerate(lrs)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.transformers_run", str(tmp_path), str(num_steps)],
        env={**os.environ, "USE_TORCH_XLA": "0", "ACCELERATE_USE_CPU": "true"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert sorted(set(found["decay"]) - {"lm_head.weight"}) == decaying  # which is the embedding
    assert len(found["losses"]) == num_steps
    assert ours[-1] < ours[0] - 0.05
    assert max(abs(a - b) for a, b in zip(ours, found["losses"], strict=True)) < 1e-5


@pytest.mark.xla
def test_the_recipes_export_loads_in_transformers_with_the_logits_of_its_last_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = ("experiment=llama_mini_pretrain", "debug=smoke", "hw.runtime=eager", "trainer.max_stage_steps=2")
    result = finished(*words, "sample.max_new_tokens=0", "name=mini", output_dir=tmp_path, as_typed=True)
    folder = tmp_path / "mini"
    loaded = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    assert sum(p.numel() for p in loaded.parameters()) == result["num_parameters"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    config = loaded.config
    assert (config.bos_token_id, config.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    (trained,) = (folder / "checkpoints").glob("*/parameters.safetensors")
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, unexpected = fresh.load_state_dict(load_file(trained), strict=False)
    assert (set(missing), unexpected) == ({"lm_head.weight"}, []), "which is the embedding"
    ids = torch.tensor([tokenizer("Dunărea este un fluviu.")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, fresh(ids).logits)
