"""The gated delta rule: rows of packed documents and single tokens against the recurrence in float64."""

import pytest
import torch
import torch.nn.functional as F

from tpu_experiments.config.recurrence import DELTA_CHUNK_TOKENS, delta_chunk_of
from tpu_experiments.models.families.gated_delta import (
    Rule,
    causal_convolution,
    inverse_of_unit_lower,
    one_token,
    over_rows,
    with_last_state,
)

LENGTHS = (5, 1, 17, 9, 4)
"""Documents of the row, the last one padding; chunks of 8 tokens have borders within, at and across them."""
KINDS = {"usual": 0.05, "steep": 200.0, "without decay, of one key": 0.0}
"""Largest decay of a token, as a logarithm."""


def random_rule(kind: str, *, tokens: int) -> Rule:
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(2, 3, tokens, *shape, generator=generator)

    query, key, value, rate = draw(8), draw(8), draw(6), draw().sigmoid()
    decay = -torch.rand(2, 3, tokens, generator=generator) * KINDS[kind]
    if not KINDS[kind]:
        key, rate = key[:, :, :1].expand(-1, -1, tokens, -1).contiguous(), torch.ones_like(rate)
    return Rule(*(part.requires_grad_() for part in (query, key, value, decay, rate)))


def tensors(rule: Rule) -> list[torch.Tensor]:
    return [rule.query_BNTD, rule.key_BNTD, rule.value_BNTE, rule.log_decay_BNT, rule.rate_BNT]


def segments(*lengths: int) -> torch.Tensor:
    numbers = [number % len(lengths) for number in range(1, len(lengths) + 1)]  # the last is 0
    return torch.cat([torch.full((n,), number) for n, number in zip(lengths, numbers, strict=True)]).expand(2, -1)


def recurrence(parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The equation of arXiv 2412.06464 for one document, token by token, and its last state."""
    query, key, value, decay, rate = parts
    query, key = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (query, key))
    state, made = torch.zeros(2, 3, 8, 6, dtype=torch.float64), []
    for t in range(query.shape[2]):
        state = state * decay[..., t].exp()[..., None, None]
        change = (value[:, :, t] - torch.einsum("bnde,bnd->bne", state, key[:, :, t])) * rate[..., t, None]
        state = state + key[:, :, t, :, None] * change[:, :, None]
        made.append(torch.einsum("bnde,bnd->bne", state, query[:, :, t]) * 8**-0.5)
    return torch.stack(made, 2), state


def in_float64(rule: Rule, lengths: tuple[int, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What each document makes alone, (B, N, T, E), and the gradients of the sum of its squares."""
    parts = [tensor.detach().double().requires_grad_() for tensor in tensors(rule)]
    cut = [part.split(lengths, 2) for part in parts]
    made = torch.cat([recurrence(list(own))[0] for own in zip(*cut, strict=True)], 2)
    return made, list(torch.autograd.grad(made.square().sum(), parts))


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, as a share of the largest value."""
    return float((found.detach().double() - expected.detach()).abs().max() / expected.detach().abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [8, 16, 64])
def test_packed_documents_are_as_alone_with_their_gradients(chunk, kind):
    rule = random_rule(kind, tokens=sum(LENGTHS))
    expected, gradients = in_float64(rule, LENGTHS)
    made = over_rows(rule, segments(*LENGTHS), chunk_tokens=chunk)
    assert far(made, expected) < 2e-6
    with torch.autograd.set_multithreading_enabled(False):
        found = torch.autograd.grad(made.square().sum(), tensors(rule))
    for name, ours, theirs in zip(("query", "key", "value", "decay", "rate"), found, gradients, strict=True):
        assert ours.isfinite().all()
        if name != "decay" or KINDS[kind]:  # a rate of 1 overwrites the state, and no decay matters
            assert far(ours, theirs) < 1e-5, name


@pytest.mark.parametrize("tokens", [1, 7, 64, 100, 300])
def test_state_after_a_row_goes_on_with_the_next_token(tokens):
    whole = random_rule("usual", tokens=tokens + 1)
    own = torch.ones(2, tokens + 1, dtype=torch.int64)
    expected, last = recurrence([tensor.detach().double() for tensor in tensors(whole)])
    before = Rule(*(tensor[:, :, :tokens] for tensor in tensors(whole)))
    made, state = with_last_state(before, own[:, :tokens])
    assert far(made, expected[:, :, :tokens]) < 2e-6
    new, state = one_token(Rule(*(tensor[:, :, tokens:] for tensor in tensors(whole))), state)
    assert far(new, expected[:, :, tokens:]) < 2e-6
    assert far(state, last) < 2e-6


def test_chunks_are_powers_of_two_up_to_the_lanes_of_a_tpu():
    assert [delta_chunk_of(n) for n in (1, 2, 3, 21, 64, 65, 128, 129, 2048)] == [1, 2, 4, 32, 64, 128, 128, 128, 128]
    assert DELTA_CHUNK_TOKENS == 128


@pytest.mark.parametrize("size", [1, 2, 16, 64, 128])
def test_the_inverse_is_as_exact_as_a_solved_system(size):
    """The product of I + A^(2^k), which is the same in exact numbers, is 4e9 off for 64 equal keys."""
    eye, below = torch.eye(size), torch.ones(size, size).tril(-1)
    rates = torch.rand(size, 1, generator=torch.Generator().manual_seed(0))
    for strict in (below, below * rates, below * torch.randn(size, size, generator=torch.Generator().manual_seed(1))):
        exact = torch.linalg.inv((eye + strict * 0.5).double())
        assert far(inverse_of_unit_lower(strict * 0.5), exact) < 1e-5
    assert far(inverse_of_unit_lower(below), torch.linalg.inv((eye + below).double())) == 0
    strict = (below * torch.randn(size, size, generator=torch.Generator().manual_seed(2)) * 0.5).double()
    pull = torch.randn(size, size, generator=torch.Generator().manual_seed(3)).double()

    def gradient(inverse_of) -> torch.Tensor:
        given = strict.clone().requires_grad_()
        (inverse_of(given) * pull).sum().backward()
        return given.grad

    torch.testing.assert_close(
        gradient(inverse_of_unit_lower),
        gradient(lambda given: torch.linalg.inv(eye + given.tril(-1))),
        rtol=1e-9,
        atol=1e-9,
    )
    upper = torch.ones(size, size).triu()  # is not read
    assert torch.equal(inverse_of_unit_lower(below + upper), inverse_of_unit_lower(below))


def test_the_convolution_ends_at_a_documents_first_token():
    generator = torch.Generator().manual_seed(0)
    tokens, weight = torch.randn(2, sum(LENGTHS), 5, generator=generator), torch.randn(5, 4, generator=generator)
    pull = torch.randn(2, sum(LENGTHS), 5, generator=generator)
    given = tokens.requires_grad_(), weight.requires_grad_()
    found = causal_convolution(tokens, weight, segments(*LENGTHS))
    expected = torch.cat(
        [
            F.conv1d(F.pad(own.transpose(1, 2), (3, 0)), weight[:, None], groups=5).transpose(1, 2)
            for own in tokens.split(LENGTHS, 1)
        ],
        1,
    )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    ours, theirs = (torch.autograd.grad((made * pull).sum(), given) for made in (found, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
