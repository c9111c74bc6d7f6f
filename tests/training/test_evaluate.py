"""Evaluation in training: accuracy and bits per byte beside a loss that stays as it is, and none without scores."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from tests.tiers import only
from tests.training.tiny import built, random_batch
from tpu_experiments.data.batches import Batch
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.data.tokens.widths import widths_of
from tpu_experiments.models.passes.forward import logits_of, target_weights
from tpu_experiments.objectives.base import Computing
from tpu_experiments.objectives.next_token import next_token_loss, next_token_scores
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.runtime.processes.launch import make_runtime
from tpu_experiments.training.evaluation import Evaluator
from tpu_experiments.training.trainer import Trainer

pytestmark = [pytest.mark.xla, pytest.mark.usefixtures("plain_attention")]
CHUNK = 16


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tpu_experiments/samples/tokenizer", revision=None, chat_template_path=None)


@pytest.fixture(scope="module")
def widths(tokenizer):
    return widths_of(tokenizer)


def batch(seed):
    """Rows with special tokens among those that are predicted, as the ends of documents and turns are."""
    tensors = random_batch(seed)
    tensors["ids"][..., 4::7] = 2 + seed % 3
    return Batch(*(tensors[name][0].numpy() for name in ("ids", "learn", "positions", "segments")), labels=["x"] * 4)


def evaluators(config, runtime, widths):
    """With the loss alone, and with scores."""
    model = built(config, runtime)
    settings = {"computing": Computing(CHUNK, loop=runtime.loop, constrain=runtime.constrain)}
    given = {"runtime": runtime, "parameters": model.trainable, "row_loss": partial(next_token_loss, **settings)}
    scores = partial(next_token_scores, **settings)
    return Evaluator(model.module, **given), Evaluator(model.module, **given, token_scores=scores, widths=widths)


@pytest.mark.parametrize("dtype", only(["bfloat16"], ["float32", "bfloat16"]))
def test_the_loss_is_the_same_to_the_bit(make_config, widths, dtype):
    config = make_config("model=gemma3_270m", "model.size=tiny", f"model.dtype={dtype}")
    runtime = make_runtime(config)
    alone, more = evaluators(config, runtime, widths)
    assert [alone.sums_of(batch(i)) for i in range(2)] == [more.sums_of(batch(i)) for i in range(2)]


def test_the_measures_are_those_of_all_logits(make_config, widths, tokenizer):
    config = make_config("model=qwen05b", "model.size=tiny", "model.dtype=float32", "hw.runtime=eager")
    _, evaluator = evaluators(config, EagerRuntime(config.hw), widths)
    batches = {"a": [batch(0), batch(1)], "b": [batch(2)]}
    found = evaluator.run(batches)
    sums = {
        source: sum(by_hand(evaluator, each, widths, tokenizer) for each in listed)
        for source, listed in batches.items()
    }
    for source, (nats, tokens, hits, text_nats, num_bytes) in sums.items():
        assert found.sources[source] == pytest.approx(nats / tokens, rel=1e-5)
        expected = {"accuracy": hits / tokens, "bits_per_byte": text_nats / math.log(2) / num_bytes}
        assert found.source_measures[source] == pytest.approx(expected, rel=1e-5)
    total = sum(sums.values())
    assert found.measures["bits_per_byte"] == pytest.approx(float(total[3] / math.log(2) / total[4]), rel=1e-5)
    assert found.num_tokens == total[1]


def by_hand(evaluator, batch, widths, tokenizer):
    """Loss in nats, tokens, hits, loss of tokens that stand for text, and their bytes, from all logits."""
    arrays = {"ids": batch.ids_GT, "learn": batch.learn_GT, "positions": batch.positions_GT}
    rows = {name: torch.from_numpy(array) for name, array in {**arrays, "segments": batch.segments_GT}.items()}
    logits = logits_of(evaluator.module, evaluator.parameters, rows).detach().double()
    targets, weights = target_weights(rows)
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets.long(), reduction="none")
    special = [index for index, token in tokenizer.added_tokens_decoder.items() if token.special]
    is_text = torch.isin(targets, torch.tensor(special), invert=True)
    assert (~is_text & (weights > 0)).any(), "a special token is predicted"
    is_hit = logits.argmax(-1) == targets
    num_bytes = (widths.of(batch.ids_GT) * ~np.isin(batch.ids_GT, special))[batch.learn_GT > 0].sum()
    sums = [(losses * weights).sum(), weights.sum(), (is_hit * weights).sum(), (losses * weights * is_text).sum()]
    return np.array([*map(float, sums), float(num_bytes)])


def test_a_tokenizer_that_does_not_tell_bytes_leaves_accuracy(make_config):
    config = make_config("model=qwen05b", "model.size=tiny", "hw.runtime=eager")
    _, evaluator = evaluators(config, EagerRuntime(config.hw), None)
    assert set(evaluator.run({"a": [batch(0)]}).measures) == {"accuracy"}


def test_a_loss_of_your_own_is_evaluated_alone(make_config, widths):
    config = make_config("model=qwen05b", "model.size=tiny", "hw.runtime=eager")
    alone, _ = evaluators(config, EagerRuntime(config.hw), widths)
    found = alone.run({"a": [batch(0)]})
    assert (found.measures, found.source_measures) == ({}, {"a": {}})


class OwnLoss(Trainer):
    """A trainer with a loss of its own."""

    def row_loss(self, module, parameters, rows):
        return next_token_loss(module, parameters, rows)


@pytest.mark.parametrize(("kind", "has_scores"), [(Trainer, True), (OwnLoss, False)])
def test_a_trainer_with_its_own_loss_has_no_scores(make_config, kind, has_scores):
    from tpu_experiments.metrics.goodput import Stopwatch
    from tpu_experiments.training.batches import RunInputs

    config = make_config("model=qwen05b", "model.size=tiny", "hw.runtime=eager")
    runtime = EagerRuntime(config.hw)
    parts = kind(config, runtime, inputs=RunInputs(None, {}, []), outputs=None, watch=Stopwatch())
    parts.model = built(config, runtime)
    parts.parameters = parts.model.trainable
    assert (parts.build_evaluator().token_scores is not None) is has_scores
