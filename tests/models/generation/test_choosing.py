"""Scores and candidates are those of transformers' logits processors; draws follow the probabilities."""

import pytest
import torch
from transformers import (
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tpu_experiments.config.task_schema import ChoiceConfig
from tpu_experiments.models.passes.generation import candidates, next_ids, processed

pytestmark = pytest.mark.xla
VOCABULARY, SLOTS = 40, 50


def case(length, *, seed=0, pad=6):
    """Logits (1, V); ids (1, S) of `length` random tokens of ten after `pad` slots, garbage after them."""
    random = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(0, 10, (1, SLOTS), generator=random, dtype=torch.int32)
    where = {"pads_B": torch.tensor([pad], dtype=torch.int32), "slot": torch.tensor([pad + length - 1])}
    return torch.randn(1, VOCABULARY, generator=random) * 3, ids_BS, where


@pytest.mark.parametrize("length", [1, 2, 3, 4, 17, 44])
@pytest.mark.parametrize(("penalty", "size"), [(1.3, 0), (0.8, 0), (1.0, 1), (1.0, 2), (1.0, 3), (1.0, 5), (1.5, 2)])
def test_scores_are_those_of_transformers(length, penalty, size):
    logits_BV, ids_BS, where = case(length, seed=length)
    ids = ids_BS[:, 6 : 6 + length].long()
    expected = logits_BV.clone()
    if penalty != 1:
        expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, expected)
    if size:
        expected = NoRepeatNGramLogitsProcessor(size)(ids, expected)
    choice = ChoiceConfig(repetition_penalty=penalty, no_repeat_ngram_size=size)
    assert torch.equal(processed(logits_BV, ids_BS=ids_BS, choice=choice, **where), expected)


@pytest.mark.parametrize("top_k", [0, 1, 7, 50])
@pytest.mark.parametrize("top_p", [0.05, 0.7, 0.99, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_probabilities_are_those_of_transformers(top_k, top_p, temperature):
    scores_BV, ids_BS, _ = case(10, seed=4)
    expected = TemperatureLogitsWarper(temperature)(ids_BS, scores_BV)
    if top_k:
        expected = TopKLogitsWarper(top_k)(ids_BS, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(ids_BS, expected)
    choice = ChoiceConfig(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
    probabilities_BC, ids_BC = candidates(scores_BV, choice=choice)
    found = torch.zeros(1, VOCABULARY).scatter(1, ids_BC, probabilities_BC)
    torch.testing.assert_close(found / found.sum(), torch.softmax(expected, -1))


def drawn(uniforms, choice):
    """Tokens drawn from one row of scores by these numbers."""
    logits_BV, ids_BS, where = case(10, seed=8)
    rows = len(uniforms)
    where = {"pads_B": where["pads_B"].expand(rows), "slot": where["slot"]}
    tokens, _ = next_ids(
        logits_BV.expand(rows, -1), ids_BS=ids_BS.expand(rows, -1), uniform_B=uniforms, choice=choice, **where
    )
    return tokens


def test_draws_follow_the_probabilities():
    choice = ChoiceConfig(do_sample=True, temperature=1.5, top_k=12, top_p=0.8)
    count = 20_000
    tokens = drawn((torch.arange(count) + 0.5) / count, choice)
    probabilities_BC, ids_BC = candidates(case(10, seed=8)[0], choice=choice)
    expected = torch.zeros(VOCABULARY).scatter(0, ids_BC[0], probabilities_BC[0] / probabilities_BC.sum())
    found = torch.bincount(tokens, minlength=VOCABULARY) / count
    torch.testing.assert_close(found, expected, atol=2 / count, rtol=0)


def test_the_ends_of_the_interval_draw_a_token_that_is_allowed():
    choice = ChoiceConfig(do_sample=True, top_k=0, top_p=0.3)
    probabilities_BC, ids_BC = candidates(case(10, seed=8)[0], choice=choice)
    allowed = ids_BC[0, : int((probabilities_BC > 0).sum())].tolist()
    first, last = drawn(torch.tensor([0.0, 1 - 2**-24]), choice).tolist()
    assert (first, last) == (allowed[0], allowed[-1])
