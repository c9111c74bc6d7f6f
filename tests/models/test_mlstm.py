"""The mLSTM cell: both of its forms and its steps against the recurrence in float64, document by document."""

import pytest
import torch

from tpu_experiments.config.recurrence import CHUNK_TOKENS, chunk_of
from tpu_experiments.models.families.mlstm import Cell, one_token, over_rows, with_last_state

LENGTHS = (5, 1, 17, 9, 4)
"""Documents of the row, the last one padding; chunks of 8 tokens have borders within, at and across them."""
EPS = 0.0
"""Beside the stabiliser a small number would weigh differently than beside the plain recurrence."""


def random_cell(*, tokens: int, dtype: torch.dtype = torch.float32) -> Cell:
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(2, 3, tokens, *shape, generator=generator)

    parts = [draw(4).to(dtype), draw(4).to(dtype), draw(6).to(dtype), draw() - 1, 2 * draw() + 2]
    return Cell(*(part.requires_grad_() for part in parts))


def tensors(cell: Cell) -> list[torch.Tensor]:
    return [cell.query_BNTD, cell.key_BNTD, cell.value_BNTE, cell.input_BNT, cell.forget_BNT]


def segments(*lengths: int) -> torch.Tensor:
    numbers = [number % len(lengths) for number in range(1, len(lengths) + 1)]  # the last is 0
    return torch.cat([torch.full((n,), number) for n, number in zip(lengths, numbers, strict=True)]).expand(2, -1)


def recurrence(parts: list[torch.Tensor]) -> torch.Tensor:
    """The equations of arXiv 2405.04517 for one document, token by token, without a stabiliser."""
    query, key, value, into, forget = parts
    matrix, vector, made = 0.0, 0.0, []
    for t in range(query.shape[2]):
        f, i = torch.sigmoid(forget[..., t])[..., None], torch.exp(into[..., t])[..., None]
        matrix = f[..., None] * matrix + i[..., None] * key[:, :, t, :, None] * value[:, :, t, None, :]
        vector = f * vector + i * key[:, :, t]
        asked = query[:, :, t] * query.shape[-1] ** -0.5
        bound = torch.maximum((asked * vector).sum(-1).abs(), torch.ones_like(i[..., 0]))
        made.append((asked[..., None] * matrix).sum(-2) / bound[..., None])
    return torch.stack(made, 2)


def in_float64(cell: Cell, lengths: tuple[int, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What each document makes alone, (B, N, T, E), and the gradients of the sum of its squares."""
    parts = [tensor.detach().double().requires_grad_() for tensor in tensors(cell)]
    cut = [part.split(lengths, 2) for part in parts]
    made = torch.cat([recurrence(list(own)) for own in zip(*cut, strict=True)], 2)
    return made, list(torch.autograd.grad(made.square().sum(), parts))


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, as a share of the largest value."""
    return float((found.detach().double() - expected.detach()).abs().max() / expected.detach().abs().max())


@pytest.mark.parametrize("chunk", [sum(LENGTHS), 8, 5, 1])
def test_packed_documents_are_as_alone_in_every_form(chunk):
    cell = random_cell(tokens=sum(LENGTHS))
    made = over_rows(cell, segments(*LENGTHS), eps=EPS, chunk_tokens=chunk)
    expected, gradients = in_float64(cell, LENGTHS)
    assert far(made, expected) < 2e-6
    found = torch.autograd.grad(made.square().sum(), tensors(cell))
    assert max(far(a, b) for a, b in zip(found, gradients, strict=True)) < 1e-5


def test_chunks_agree_over_a_row_that_is_longer_than_the_parallel_form():
    """The sums of a row's logarithms reach -900 here; as one float32 they put the two 7e-5 apart."""
    cell, lengths = random_cell(tokens=2100), (900, 1197, 3)
    assert chunk_of(2100) == CHUNK_TOKENS
    with torch.no_grad():
        whole = over_rows(cell, segments(*lengths), eps=EPS, chunk_tokens=2100)
        assert far(over_rows(cell, segments(*lengths), eps=EPS), whole.double()) < 2e-6


@pytest.mark.parametrize("chunk", [sum(LENGTHS), 8])
def test_gates_at_their_caps_leave_everything_finite(chunk):
    for into, forget in ((15.0, -15.0), (-15.0, -15.0), (-15.0, 15.0), (15.0, 15.0)):
        cell = random_cell(tokens=sum(LENGTHS))
        with torch.no_grad():
            cell.input_BNT.fill_(into)
            cell.forget_BNT.fill_(forget)
        made = over_rows(cell, segments(*LENGTHS), eps=EPS, chunk_tokens=chunk)
        parts = torch.autograd.grad(made.square().sum(), tensors(cell))
        assert all(bool(part.isfinite().all()) for part in (made, *parts))


def test_bfloat16_rounds_products_alone():
    cell = random_cell(tokens=sum(LENGTHS), dtype=torch.bfloat16)
    made = over_rows(cell, segments(*LENGTHS), eps=EPS, chunk_tokens=8)
    assert made.dtype == torch.bfloat16
    assert far(made, in_float64(cell, LENGTHS)[0]) < 0.02


@pytest.mark.parametrize("padding", [0, 6])
def test_the_state_goes_on_token_by_token(padding):
    """A prompt of 11 tokens behind padding, then 7 more, is the document of 18 tokens."""
    whole = random_cell(tokens=padding + 18)
    prompt = Cell(*(part[:, :, : padding + 11] for part in tensors(whole)))
    rows = torch.cat([torch.zeros(2, padding), torch.ones(2, 11)], 1).int()
    with torch.no_grad():
        made, state = with_last_state(prompt, rows, eps=EPS)
        found = [made[:, :, padding:]]
        for t in range(padding + 11, padding + 18):
            made, state = one_token(Cell(*(part[:, :, t : t + 1] for part in tensors(whole))), state, eps=EPS)
            found.append(made)
    expected, _ = in_float64(Cell(*(part[:, :, padding:] for part in tensors(whole))), (18,))
    assert far(torch.cat(found, 2), expected) < 2e-6
