"""Masks that are a hash of a row's words, layer, projection, token and feature behave as if each bit were drawn."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from tpu_experiments.models.parts.dropout import RowDropout, drop_by_rows, dropped, hashed, noise, random_mask
from tpu_experiments.models.stack.layer_graph import LayerGraph

TOKENS, FEATURES, ROWS = 16384, 256, 16
SITE = -123456789


def words(seed: int, *, rows: int = ROWS) -> Tensor:
    """Random words of rows (R,)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (rows,), generator=generator).to(torch.int32)


def bits_of(words_R: Tensor, *, keep: float, layer: Tensor | int = 3, site: int = SITE, tokens: int = TOKENS) -> Tensor:
    """Bits of one mask (tokens, FEATURES) of mean 0 and variance 1."""
    rows = len(words_R)
    mask = random_mask(torch.empty(rows, tokens // rows, FEATURES), words_R, layer=layer, site=site, keep=keep)
    return ((mask.float() - keep) / math.sqrt(keep * (1 - keep))).flatten(0, 1)


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("keep", [0.95, 0.5, 0.9])
def test_bits_have_the_probability_and_no_correlation(keep, rows):
    bits = bits_of(words(3, rows=rows), keep=keep)
    assert bits.mean().abs() < 5 / math.sqrt(TOKENS * FEATURES)
    for means, count in ((bits.mean(0), TOKENS), (bits.mean(1), FEATURES)):
        assert means.std() * math.sqrt(count) == pytest.approx(1.0, abs=0.15)
    pairs = (bits.T @ bits / TOKENS).fill_diagonal_(0.0) * math.sqrt(TOKENS)
    assert pairs.std() == pytest.approx(1.0, abs=0.05)
    assert pairs.abs().max() < 7.5  # 32,640 pairs of skewed bits
    corners = (bits[:-1, :-1] * bits[1:, :-1] * bits[:-1, 1:] * bits[1:, 1:]).mean()
    assert corners.abs() < 6 / math.sqrt(TOKENS * FEATURES)


@pytest.mark.parametrize("keep", [0.95, 0.5])
def test_masks_of_other_layers_projections_steps_and_rows_have_nothing_in_common(keep):
    """Words that structure might bring near among them: exchanged rows, one bit apart, complements."""
    own = words(1)
    masks = [bits_of(own, keep=keep, layer=layer) for layer in (0, 1, 2, 4, 31)]
    masks += [bits_of(own, keep=keep, layer=0, site=site) for site in (SITE + 1, -SITE, 0)]
    masks += [bits_of(other, keep=keep, layer=0) for other in (words(2), own.roll(1, 0), own ^ 1, ~own)]
    flat = torch.stack([mask.flatten() for mask in masks])
    pairs = (flat @ flat.T / flat.shape[1]).fill_diagonal_(0.0) * math.sqrt(flat.shape[1])
    assert pairs.abs().max() < 5
    rows = masks[0].unflatten(0, (ROWS, -1)).flatten(1)
    assert ((rows @ rows.T / rows.shape[1]).fill_diagonal_(0.0) * math.sqrt(rows.shape[1])).abs().max() < 5


def test_a_row_has_its_mask_wherever_it_is():
    """Alone, among others, in a shorter batch, with its tokens flattened, and with the layer's number in a tensor."""
    both, keep = words(5, rows=2), 0.5
    mask = random_mask(torch.empty(2, 64, 32), both, layer=7, site=SITE, keep=keep)
    again = random_mask(torch.empty(2, 64, 32), both.clone(), layer=torch.tensor(7).int(), site=SITE, keep=keep)
    assert torch.equal(mask, again)
    assert torch.equal(mask[1:], random_mask(torch.empty(1, 64, 32), both[1:], layer=7, site=SITE, keep=keep))
    assert torch.equal(mask[:, :40], random_mask(torch.empty(2, 40, 32), both, layer=7, site=SITE, keep=keep))
    assert torch.equal(mask.flatten(0, 1), random_mask(torch.empty(128, 32), both, layer=7, site=SITE, keep=keep))
    with pytest.raises(ValueError, match=r"dropout of \(3, 32\): 3 tokens are not those of 2 rows"):
        random_mask(torch.empty(3, 32), both, layer=7, site=SITE, keep=keep)


def test_weights_of_attention_have_the_mask_of_a_row_head_and_token():
    """With rows and heads in one dimension, as DeBERTa's have them, and in a shorter row."""
    own, keep = words(7, rows=2), 0.9
    mask = random_mask(torch.empty(2, 6, 64, 64), own, layer=1, site=SITE, keep=keep)
    assert mask.float().mean() == pytest.approx(keep, abs=0.01)
    flat = random_mask(torch.empty(12, 64, 64), own, layer=1, site=SITE, keep=keep)
    assert torch.equal(flat.unflatten(0, (2, 6)), mask)
    short = random_mask(torch.empty(2, 6, 40, 40), own, layer=1, site=SITE, keep=keep)
    assert torch.equal(short, mask[:, :, :40, :40])
    heads = ((mask.float() - keep) / math.sqrt(keep * (1 - keep))).flatten(2).flatten(0, 1)
    assert (heads @ heads.T / heads.shape[1]).fill_diagonal_(0.0).abs().max() < 5 / 64


class Block(nn.Module):
    """Two layers, with and without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.25)) for _ in range(2)])
        self.off = nn.Dropout(0.0)


def test_dropout_of_a_models_own_follows_from_the_rows_words():
    block, x, own = Block().train(), torch.ones(2, 512, 8), words(3, rows=2)
    drop_by_rows(block)
    first, second = (layer[1] for layer in block.layers)
    assert [type(first), first.p, type(block.off)] == [RowDropout, 0.25, nn.Dropout]
    with noise(own):
        found = first(x)
        torch.manual_seed(1)
        assert torch.equal(first(x), found)
        assert torch.equal(first(x[1:].expand(2, -1, -1))[1], found[1])
        assert not torch.equal(second(x), found), "the number of the layer counts"
        with noise(own, layer=torch.tensor(1, dtype=torch.int32)):
            assert torch.equal(first(x), second(x))
        distances = first(torch.ones(512, 8))
    assert found.unique().tolist() == pytest.approx([0.0, 1 / 0.75]) == distances.unique().tolist()
    assert (found == 0).float().mean() == pytest.approx(0.25, abs=0.02)
    assert (distances == 0).float().mean() == pytest.approx(0.25, abs=0.03)
    with noise(own + 1):
        assert not torch.equal(first(x), found)
    with pytest.raises(RuntimeError, match=r"own dropout=0\.25; the rows handed to the model lack 'noise'"):
        first(x)
    assert first.eval()(x) is x


def test_one_token_is_enough():
    mask = random_mask(torch.empty(1, 4096), words(0, rows=1), layer=0, site=SITE, keep=0.75)
    assert mask.float().mean() == pytest.approx(0.75, abs=0.04)


@pytest.mark.xla
def test_the_device_makes_the_words_and_masks_of_the_host():
    import torch_xla

    edges = torch.tensor([0, 1, -1, -5, 12345678, -(2**31), 2**31 - 1], dtype=torch.int32)
    x, place = torch.zeros(7, 24, 40), {"layer": 23, "site": SITE, "keep": 0.9}
    placed, placed_x = (tensor.to(torch_xla.device()) for tensor in (edges, x))
    found = [hashed(placed), random_mask(placed_x, placed, **place)]
    torch_xla.sync()
    expected = [hashed(edges), random_mask(x, edges, **place)]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_words_arehashed_as_published():
    near = torch.arange(-50_000, 50_000, dtype=torch.int32)
    assert [word % 2**32 for word in hashed(near).tolist()] == [lowbias32(word % 2**32) for word in near.tolist()]
    assert len(set(hashed(near).tolist())) == len(near)


def lowbias32(x: int) -> int:
    """In integers without bounds, as published."""
    x = ((x ^ x >> 16) * 0x7FEB352D) % 2**32
    x = ((x ^ x >> 15) * 0x846CA68B) % 2**32
    return x ^ x >> 16


def test_a_gradient_passes_on_the_meta_device() -> None:
    # AOTAutograd there gives torch.where with a number none, and only warns: LayerGraph makes an error of it.
    def layer(hidden: Tensor, weights: Sequence[Tensor], constants: Sequence[Tensor]) -> Tensor:
        return dropped(hidden, constants[0], layer=1, site=SITE, keep=0.9) @ weights[0]

    def lossy(hidden: Tensor, weights: Sequence[Tensor], constants: Sequence[Tensor]) -> Tensor:
        return torch.where(constants[0] > 0, hidden, 0.0) @ weights[0]

    hidden, stack = torch.empty(4, 8, 16, device="meta"), torch.empty(2, 16, 16, device="meta", requires_grad=True)
    words_R, mask_R11 = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((4,), (4, 1, 1)))
    graph = LayerGraph.trace(layer, nn.Identity(), hidden, [stack], [words_R], remat="layer_inputs")
    code = graph.backward.code  # type: ignore[attr-defined]  # a graph module
    assert "where" in code
    with pytest.raises(UserWarning, match="an autograd kernel was not registered"):
        LayerGraph.trace(lossy, nn.Identity(), hidden, [stack], [mask_R11], remat="layer_inputs")
