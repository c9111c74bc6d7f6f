"""Masks made of a number for each token and one for each feature behave as if each bit were drawn."""

import math

import pytest
import torch

from tpu_experiments.models.dropout import _mixed, random_mask

TOKENS, FEATURES = 16384, 256


@pytest.mark.parametrize("keep", [0.95, 0.5, 0.9])
def test_bits_have_the_probability_and_no_correlation(keep):
    torch.manual_seed(3)
    mask = random_mask(torch.empty(16, TOKENS // 16, FEATURES), keep=keep).flatten(0, 1)
    bits = (mask.float() - keep) / math.sqrt(keep * (1 - keep))  # mean 0, variance 1
    assert bits.mean().abs() < 5 / math.sqrt(TOKENS * FEATURES)
    for means, count in ((bits.mean(0), TOKENS), (bits.mean(1), FEATURES)):
        assert means.std() * math.sqrt(count) == pytest.approx(1.0, abs=0.15)
    pairs = (bits.T @ bits / TOKENS).fill_diagonal_(0.0) * math.sqrt(TOKENS)
    assert pairs.std() == pytest.approx(1.0, abs=0.05)
    assert pairs.abs().max() < 7.5  # 32,640 pairs of skewed bits
    corners = (bits[:-1, :-1] * bits[1:, :-1] * bits[:-1, 1:] * bits[1:, 1:]).mean()
    assert corners.abs() < 6 / math.sqrt(TOKENS * FEATURES)


def test_masks_differ_from_draw_to_draw_and_not_from_seed_to_seed():
    masks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks += [random_mask(torch.empty(4, 64, 64), keep=0.5) for _ in range(2)]
    first, second, again, _, other, _ = masks
    assert torch.equal(first, again)
    for different in (second, other):
        assert (first == different).float().mean() == pytest.approx(0.5, abs=0.05)


def test_one_row_of_features_is_enough():
    torch.manual_seed(0)
    assert random_mask(torch.empty(4096), keep=0.75).float().mean() == pytest.approx(0.75, abs=0.04)


@pytest.mark.xla
def test_the_device_mixes_words_as_the_host_does():
    import torch_xla

    words = torch.tensor([0, 1, -1, -5, 12345678, -(2**31), 2**31 - 1], dtype=torch.int32)
    placed = words.to(torch_xla.device())
    mixed = _mixed(placed)
    torch_xla.sync()
    assert torch.equal(mixed.cpu(), _mixed(words))
    assert len(set(_mixed(torch.arange(-50_000, 50_000, dtype=torch.int32)).tolist())) == 100_000
