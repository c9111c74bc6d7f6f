"""Draws in two levels are those of float64's distribution function, and only of possible values."""

import pytest
import torch

from tests.models.generation.small import merged, overrides, prompts_of, with_adapter
from tpu_experiments.config.task_schema import ChoiceConfig
from tpu_experiments.models.passes.draws import BLOCK, drawn
from tpu_experiments.models.passes.generation import Decoder, Sampling, next_ids
from tpu_experiments.runtime.processes.launch import make_runtime

NUM = 1300


def logits_of(num):
    return torch.randn(num, generator=torch.Generator().manual_seed(0)) * 2


def test_draws_are_those_of_float64():
    """Of 100,000 draws 99.99 % at least; the others are neighbours, a rounding apart."""
    logits_V, count = logits_of(NUM), 100_000
    uniforms = torch.rand(count, generator=torch.Generator().manual_seed(1))
    found = torch.cat([drawn(logits_V.expand(len(u), -1), u) for u in uniforms.split(20_000)]).long()
    shares = torch.softmax(logits_V.double(), -1)
    expected = torch.searchsorted(shares.cumsum(-1), uniforms.double(), right=True)
    assert float((found == expected).double().mean()) >= 0.9999
    assert int((found - expected).abs().max()) <= 1
    spread = torch.bincount(found, minlength=NUM) / count - shares
    assert float(spread.abs().sum() / 2) < 0.03


@pytest.mark.parametrize("num", [1, BLOCK - 1, BLOCK, NUM])
def test_impossible_values_are_never_drawn(num):
    """Not at the ends of the interval, nor where the last block or the first values are impossible."""
    logits_V = logits_of(num)
    logits_V[torch.arange(num) % 3 > 0] = -torch.inf
    logits_V[num // 2 + 1 :] = -torch.inf
    if num > 4:
        logits_V[:2] = -torch.inf
    uniforms = torch.tensor([0.0, 0.3, 0.7, 1 - 2**-24])
    found = drawn(logits_V.expand(4, -1), uniforms).long()
    possible = torch.isfinite(logits_V).nonzero()[:, 0]
    assert torch.isfinite(logits_V[found]).all()
    assert int(found[0]) == int(possible[0])
    assert int(found[-1]) == int(possible[-1]) or num > BLOCK


@pytest.mark.parametrize("how", [{"top_k": 0}, {"top_k": 7}, {"top_k": 0, "top_p": 0.8}], ids=str)
def test_log_probabilities_are_those_of_what_was_drawn_from(how):
    """And a temperature of 0 takes the likeliest."""
    logits_BV, count = logits_of(40).expand(4000, -1), 4000
    where = {
        "ids_BS": torch.zeros(count, 3, dtype=torch.int32),
        "pads_B": torch.zeros(count),
        "slot": torch.tensor([1]),
    }
    uniforms = (torch.arange(count) + 0.5) / count
    choice = ChoiceConfig(do_sample=True, **how)
    ids_B, logp_B = next_ids(logits_BV, uniform_B=uniforms, choice=choice, shape=torch.tensor([1.5]), **where)
    found = torch.bincount(ids_B, minlength=40) / count
    torch.testing.assert_close(torch.exp(logp_B), found[ids_B.long()], atol=1.5 / count, rtol=0)
    ids_B, _ = next_ids(logits_BV, uniform_B=uniforms, choice=choice, shape=torch.tensor([0.0]), **where)
    assert set(ids_B.tolist()) == {int(logits_BV[0].argmax())}
    greedy_B, _ = next_ids(logits_BV, uniform_B=uniforms, choice=ChoiceConfig(), **where)
    assert torch.equal(greedy_B, ids_B)


@pytest.mark.xla
@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_answers_are_whole_with_log_probabilities_of_the_model(make_config, runtime):
    """Two programs for any temperature, and an answer ends at its end."""
    made = make_runtime(make_config(*overrides("qwen05b", runtime)))
    module = with_adapter(make_config(*overrides("qwen05b", runtime)), made)
    choice = ChoiceConfig(do_sample=True, top_k=0)
    decoder = Decoder(module, runtime=made, choice=choice, num_rows=3, max_new_tokens=10, tokens_per_call=3, seed=0)
    prompts, how = prompts_of(4, 9), {"draws": [3, 4], "bucket": 16}
    before = made.counters().num_compiles
    whole = decoder.complete(prompts, sampling=Sampling(1.3), **how)
    *_, streamed = decoder.stream(prompts, sampling=Sampling(1.3), **how)
    assert whole.ids_BN.tolist() == streamed
    assert whole.lengths_B.tolist() == [10, 10]
    greedy = decoder.complete(prompts, sampling=Sampling(0.0), **how)
    if runtime == "xla":
        assert made.counters().num_compiles - before == decoder.num_programs == 2
    theirs = merged(make_config(*overrides("qwen05b", runtime)))
    for found, heat in ((whole, 1.3), (greedy, 1.0)):
        for row, prompt in enumerate(prompts):
            ids = torch.tensor([[*prompt, *found.ids_BN[row].tolist()]])
            with torch.no_grad():
                logits = theirs(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
            expected = torch.log_softmax(logits / heat, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            torch.testing.assert_close(torch.from_numpy(found.log_probs_BN[row]), expected, atol=2e-5, rtol=0)
    end = int(whole.ids_BN[0, 4])
    first = whole.ids_BN[0].tolist().index(end) + 1
    cut = decoder.complete(prompts, sampling=Sampling(1.3), ends=[end], **how)
    assert cut.lengths_B[0] == first
    assert cut.ids_BN[0].tolist() == [*whole.ids_BN[0, :first].tolist(), *[0] * (10 - first)]
    assert (cut.log_probs_BN[0, first:] == 0).all()
