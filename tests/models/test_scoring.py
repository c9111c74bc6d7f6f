"""Scores of tokens against transformers' own logits: losses, likeliest tokens, and the row sums of training."""

import pytest
import torch

from tests.training.tiny import ARCHITECTURES, built, random_batch
from tpu_experiments.models.passes import loss
from tpu_experiments.models.passes.forward import logits_of, target_weights
from tpu_experiments.objectives.base import Computing
from tpu_experiments.objectives.next_token import next_token_loss, next_token_scores
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.runtime.processes.launch import make_runtime

pytestmark = pytest.mark.xla


@pytest.fixture(autouse=True)
def _few_first_entries(monkeypatch):
    monkeypatch.setattr(loss, "NUM_FIRST", 64)


def rows_of(batch):
    return {name: batch[name][0] for name in ("ids", "learn", "positions", "segments")}


@pytest.mark.parametrize("chunk_tokens", [None, 10, 4096])
@pytest.mark.parametrize("model", ARCHITECTURES)
def test_scores_are_those_of_all_logits(make_config, model, chunk_tokens):
    config = make_config(f"model={model}", "model.size=tiny", "model.dtype=float32", "hw.runtime=eager")
    runtime = EagerRuntime(config.hw)
    model = built(config, runtime)
    rows = rows_of(random_batch(3))
    found = next_token_scores(model.module, model.trainable, rows, computing=Computing(chunk_tokens))
    logits = logits_of(model.module, model.trainable, rows).detach()
    targets, weights = target_weights(rows)
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets.long(), reduction="none")
    torch.testing.assert_close(found.losses_RT[:, :-1], expected[:, :-1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.hits_RT, (logits.argmax(-1) == targets).float())
    torch.testing.assert_close(found.weights_R, weights.sum(1))
    assert not found.losses_RT.requires_grad


@pytest.mark.parametrize("chunk_tokens", [None, 10])
def test_their_sums_are_training_s_to_the_bit(make_config, chunk_tokens):
    config = make_config(
        "model=qwen05b", "model.size=tiny", "model.dtype=float32", "hw.parallel=inline", "hw.num_devices=1"
    )
    runtime = make_runtime(config)
    model = built(config, runtime)
    settings = {"computing": Computing(chunk_tokens, loop=runtime.loop, constrain=runtime.constrain)}

    def sums(batch):
        with torch.no_grad():
            return torch.stack(next_token_loss(model.module, model.trainable, batch, **settings))

    def scored(batch):
        found = next_token_scores(model.module, model.trainable, batch, **settings)
        return torch.stack([found.sums_R, found.weights_R]), found.losses_RT, found.hits_RT

    plain, more = runtime.program(sums, name="plain"), runtime.program(scored, name="more")
    batch = runtime.put(rows_of(random_batch(4)), rows_dim=0)
    both, losses, hits = more(batch)
    assert torch.equal(plain(batch).cpu(), both.cpu())
    plainly = EagerRuntime(config.hw)
    twin = built(config, plainly)
    expected = next_token_scores(twin.module, twin.trainable, rows_of(random_batch(4)))
    torch.testing.assert_close(losses.cpu(), expected.losses_RT, atol=1e-4, rtol=1e-4)
    assert (hits.cpu() != expected.hits_RT).float().mean() < 0.02
