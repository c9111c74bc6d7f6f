"""Objectives: what a step's loss is, and what it is divided by; random words of rows; one of a user's own."""

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.tiers import only
from tests.training.runs import finished, losses, run
from tests.training.tiny import Run, built, plain_updates, random_batch
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.targets import locate
from tpu_experiments.data.batches import Batch
from tpu_experiments.models.passes.forward import logits_of, target_weights
from tpu_experiments.objectives.base import Computing, objective_of
from tpu_experiments.objectives.next_token import NextToken
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.runtime.processes.launch import make_runtime
from tpu_experiments.tasks.setup import check_targets
from tpu_experiments.training.batches import with_noise

pytestmark = pytest.mark.xla
TINY = ("model=qwen05b", "model.size=tiny", "model.dtype=float32", "lora=all_linear_r8")


@pytest.mark.parametrize("chunk_tokens", [None, 7])
@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_z_loss_is_its_formula_in_training_alone(make_config, runtime, chunk_tokens):
    config = make_config(*TINY, f"hw.runtime={runtime}")
    device = make_runtime(config)
    model = built(config, device)
    rows = {name: device.place(t[0], name=name) for name, t in random_batch(3).items() if name != "lr"}
    how = Computing(chunk_tokens, 1, device.loop, device.constrain)
    with torch.no_grad():
        plain, tokens = NextToken(computing=how).row_loss(model.module, model.trainable, rows)
        with_z, same = NextToken(z_loss=1e-2, computing=how).row_loss(model.module, model.trainable, rows)
        log_z = torch.logsumexp(logits_of(model.module, model.trainable, rows).float(), -1)
        expected = plain + 1e-2 * (log_z.square() * target_weights(rows)[1]).sum(1)
        scored = NextToken(z_loss=1e-2, computing=how).scores(model.module, model.trainable, rows)
    torch.testing.assert_close(with_z.cpu(), expected.cpu(), rtol=2e-5, atol=0)
    assert torch.equal(tokens.cpu(), same.cpu())
    torch.testing.assert_close(scored.sums_R.cpu(), plain.cpu(), rtol=1e-6, atol=0)


def test_the_config_makes_the_objective(make_config):
    config = make_config(*TINY, "objective.z_loss=0.001")
    made = objective_of(config, Computing(chunk_tokens=5))
    assert isinstance(made, NextToken)
    assert (made.z_loss, made.computing.chunk_tokens) == (0.001, 5)


class PerRow:
    """Every row has the same weight, however many tokens it has."""

    draws, has_scores = False, True

    def __init__(self, *, computing, options=None):
        self.next_token = NextToken(computing=computing)

    def count(self, rows):
        return (target_weights(rows)[1].sum(1) > 0).to(torch.float32).sum()

    def row_loss(self, module, parameters, rows):
        sums, tokens = self.next_token.row_loss(module, parameters, rows)
        return sums / tokens.clamp(min=1), (tokens > 0).to(torch.float32)

    def scores(self, module, parameters, rows):
        return self.next_token.scores(module, parameters, rows)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loss_is_divided_by_its_own_count(make_config, accumulation):
    """By plain autograd over all rows at once; some rows have no token that counts."""
    config = make_config(*TINY, "hw.runtime=eager")
    runtime = EagerRuntime(config.hw)
    objective = PerRow(computing=Computing())
    batch = random_batch(1, accumulation=accumulation)
    batch["learn"][0, 1] = 0
    stepped = Run(config, runtime, updates=partial(plain_updates, clip_norm=None), row_loss=objective.row_loss)
    stepped.step.count = objective.count
    leaves = {name: p.detach().clone().requires_grad_() for name, p in stepped.parameters.items()}
    rows = {name: batch[name].flatten(0, 1) for name in ("ids", "learn", "positions", "segments")}
    logits = logits_of(stepped.model.module, leaves, rows).float()
    targets, weights = target_weights(rows)
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten().long(), reduction="none").view_as(weights)
    counted = weights.sum(1) > 0
    mean = ((each * weights).sum(1)[counted] / weights.sum(1)[counted]).mean()
    expected = torch.autograd.grad(mean, list(leaves.values()))
    mean = mean.detach()
    grads, sums = stepped.step.gradients(stepped.parameters, batch, objective.count(rows))
    assert float(sums.sum() / objective.count(rows)) == pytest.approx(float(mean), rel=1e-5)
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-7)
    (loss,) = stepped.losses([batch])
    assert loss == pytest.approx(float(mean), rel=1e-5)


def test_words_depend_on_seed_batch_and_row_alone():
    import numpy as np

    zeros = np.zeros((6, 4), np.int32)
    batch = Batch(zeros, zeros, zeros, zeros, labels=[])
    first = with_noise(batch, seed=0, index=7).noise_G
    assert first is not None
    assert len(set(first.tolist())) == 6
    assert (with_noise(batch, seed=0, index=7).noise_G == first).all()
    for other in (with_noise(batch, seed=1, index=7), with_noise(batch, seed=0, index=8)):
        assert not (other.noise_G == first).any()


OWN = '''
"""Learn from half of the tokens, another half in every step."""

import torch

from tpu_experiments.data.rows import Array
from tpu_experiments.models.passes.forward import logits_of, row_losses


class Half:
    draws = True
    has_scores = False
    arrays = (Array("reference", "float32", per="row"),)

    def __init__(self, *, options, computing):
        self.part = options["part"]

    def chosen(self, rows):
        index = torch.arange(rows["ids"].shape[1], device=rows["ids"].device, dtype=torch.int32)
        mixed = (rows["noise"][:, None] ^ (index * 40503)) * 1103515245
        kept = ((mixed >> 16) & 255) < 256 * self.part
        return {**rows, "learn": rows["learn"] * kept}

    def count(self, rows):
        return self._weights(rows).sum()

    def _weights(self, rows):
        from tpu_experiments.models.passes.forward import target_weights

        return target_weights(self.chosen(rows))[1]

    def row_loss(self, module, parameters, rows):
        sums, tokens = row_losses(logits_of(module, parameters, rows), self.chosen(rows))
        return sums + rows["reference"], tokens

    def scores(self, module, parameters, rows):
        raise NotImplementedError
'''
OWN_YAML = """
defaults: [base, _self_]
name: half
_target_: my_lab.objective.Half
options: {part: 0.5}
"""


@pytest.fixture
def lab(tmp_path, monkeypatch) -> Path:
    """A folder of a user's own, with one file and one YAML."""
    files = {"my_lab/__init__.py": "", "my_lab/objective.py": OWN, "conf/objective/half.yaml": OWN_YAML}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return tmp_path


@pytest.mark.parametrize("runtime", only(["eager"], ["eager", "xla"]))
def test_an_objective_of_your_own_is_one_file_and_one_yaml(lab, tmp_path, runtime):
    """It draws: held-out losses are repeated to the bit, and a resumed run is the run left alone."""
    words = ("--config-dir", str(lab / "conf"), "plugins=[my_lab]", "objective=half", "name=own")
    words += (f"hw.runtime={runtime}", "debug=smoke")
    words += ("trainer.max_stage_steps=4", "trainer.log_every_steps=1", "trainer.eval_every_steps=2")
    words += ("curriculum=single", "schedule=constant", "sample.max_new_tokens=0", "checkpoint.every_steps=2")
    whole = finished(*words, output_dir=tmp_path / "whole")
    assert runtime == "eager" or whole["compiles_after_warmup"] == 0
    assert "bits_per_byte" not in json.dumps(whole["eval_sources"])
    assert len(set(losses(tmp_path / "whole"))) == 4
    again = tmp_path / "again"
    assert run(*words, "trainer.max_stage_steps=2", output_dir=again).returncode == 0
    resumed = finished(*words, output_dir=again)
    assert resumed["eval_loss_before"] == whole["eval_loss_before"]
    assert resumed["eval_loss"] == whole["eval_loss"]
    assert locate("tpu_experiments.objectives.next_token.NextToken", key="objective").draws is False
    for plugins, sentence in (((), "none of this project's classes"), (words[2:3], "masked or replaced tokens")):
        refused = run("task=evaluate", f"task.run={again / 'own'}", *plugins, output_dir=tmp_path / "e")
        assert refused.returncode == 2
        assert "my_lab.objective.Half" in refused.stderr
        assert sentence in refused.stderr


def test_an_objective_that_does_not_say_what_it_needs_is_refused(make_config, monkeypatch):
    """Before anything is written, and not by a traceback in the middle of a run."""
    config = make_config(*TINY)
    monkeypatch.setattr(NextToken, "has_scores", "loss")
    with pytest.raises(ConfigError, match=r"^objective\._target_=.*NextToken; its has_scores must be True or False"):
        check_targets(config)
