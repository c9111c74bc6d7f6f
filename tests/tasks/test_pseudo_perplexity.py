"""Pseudo-perplexity: every token masked once in turn, as a loop over transformers' own class does it."""

import math

import numpy as np
import pytest
import torch

from tests.models.encoders import ENCODERS, source_of
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.held_out import HeldOut
from tpu_experiments.data.steps.pack import FlatTokens
from tpu_experiments.data.tokens.tokenize import LEARN
from tpu_experiments.metrics.held_out import Resampling, compared_measures, pseudo_perplexity
from tpu_experiments.objectives.masked import Masked
from tpu_experiments.objectives.vocabulary import Vocabulary
from tpu_experiments.runtime.processes.launch import make_runtime
from tpu_experiments.tasks.evaluate.inputs import check_pseudo_perplexity
from tpu_experiments.tasks.evaluate.pseudo_perplexity import MOST_COPIES, pseudo_sums, rows_of_copies
from tpu_experiments.training.evaluation import Scorer

pytestmark = pytest.mark.xla
MASK = 4
SEQ_LEN = 40
VOCABULARY = Vocabulary(MASK, 512, ((0, 7),))


def documents(*lengths: int) -> HeldOut:
    """Documents that begin with the special token 1; the last token of each is not learnt."""
    generator = np.random.default_rng(0)
    ids = [np.array([1, *generator.integers(8, 512, length - 1)], np.int32) for length in lengths]
    flags = [np.array([0, *[LEARN] * (length - 2), 0], np.uint8) for length in lengths]
    return HeldOut("x", "text", FlatTokens(np.concatenate(ids), np.concatenate(flags), np.array(lengths)), len(lengths))


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_losses_are_those_of_every_token_masked_alone(make_config, runtime):
    device = make_runtime(make_config(f"hw.runtime={runtime}"))
    module = source_of(ENCODERS[0]).built(source_of(ENCODERS[0]).config, dtype=torch.float32).eval()
    held_out, objective = documents(9, 21, 70, 5), Masked()
    objective.vocabulary = VOCABULARY
    expected = []
    for ids, flags in list(held_out.documents())[:3]:
        ids, learnt = torch.tensor(ids[:SEQ_LEN])[None].long(), np.flatnonzero(flags[:SEQ_LEN] & LEARN)
        nats = 0.0
        for place in learnt.tolist():
            read = ids.clone()
            read[0, place] = MASK
            with torch.no_grad():
                nats -= float(torch.log_softmax(module(input_ids=read).logits[0, place], -1)[ids[0, place]])
        expected.append([len(learnt), nats])
    placed = {name: device.place(p.detach(), name=name) for name, p in module.named_parameters()}
    module = module.to(device.device)
    before = device.counters().num_compiles
    scorer = Scorer(
        module,
        runtime=device,
        token_scores=lambda *rows: objective.masked_scores(*rows, places=MOST_COPIES),
        parameters=placed,
        name="pseudo_perplexity",
    )
    found = pseudo_sums(held_out, num_documents=3, scorer=scorer, shape=(4, SEQ_LEN), vocabulary=VOCABULARY)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert device.counters().num_compiles - before == (1 if runtime == "xla" else 0)
    (own,) = compared_measures(
        {"x": found}, None, measure=pseudo_perplexity, resampling=Resampling(100, 0.95, 0)
    ).values()
    tokens, nats = np.sum(expected, 0)
    assert own.base["pseudo_perplexity"].value == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert (own.num_documents, own.num_tokens) == (3, tokens)


def test_every_copy_is_the_document_with_another_token_masked():
    ids = np.array([1, 9, 8, 7, 6], np.int32)
    (row,) = rows_of_copies(ids, np.array([1, 2, 4]), seq_len=18)
    assert row.segments_NT[0].tolist() == [1] * 5 + [2] * 5 + [3] * 5 + [0] * 3
    assert row.positions_NT[0, :15].tolist() == [*range(5)] * 3
    assert row.ids_NT[0, :15].tolist() == ids.tolist() * 3
    assert np.flatnonzero(row.learn_NT).tolist() == [1, 7, 14]
    many = list(rows_of_copies(ids, np.arange(5), seq_len=9))
    assert [int(np.flatnonzero(row.learn_NT)[0]) for row in many] == [0, 1, 2, 3, 4]
    (full, rest) = rows_of_copies(np.arange(20, dtype=np.int32), np.arange(20), seq_len=1000)
    assert (full.learn_NT.sum(), rest.learn_NT.sum()) == (MOST_COPIES, 20 - MOST_COPIES)


def test_a_model_that_predicts_no_masked_tokens_is_refused(make_config):
    with pytest.raises(ConfigError, match=r"task\.pseudo_perplexity_documents=3 with objective=next_token"):
        check_pseudo_perplexity(make_config("task=evaluate", "task.pseudo_perplexity_documents=3"))
