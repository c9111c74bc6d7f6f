"""Attention of one token to a cache equals sdpa's, and eager attention's where scores are capped."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from tpu_experiments.models.parts.attention import decode

HEADS, KV, SLOTS, WIDTH = 14, 2, 40, 64


def case(tokens=1):
    random = torch.Generator().manual_seed(0)
    sizes = ((4, HEADS, tokens, WIDTH), (4, KV, SLOTS, WIDTH), (4, KV, SLOTS, WIDTH))
    query, key, value = (torch.randn(size, generator=random) for size in sizes)
    mask = torch.rand(4, 1, tokens, SLOTS, generator=random) < 0.6
    mask[..., 0] = True
    return query, key, value, mask


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_it_equals_sdpa(tokens, scaling):
    query, key, value, mask = case(tokens)
    key_H, value_H = (each.repeat_interleave(HEADS // KV, 1) for each in (key, value))
    expected = scaled_dot_product_attention(query, key_H, value_H, attn_mask=mask, scale=scaling).transpose(1, 2)
    module = nn.Module()
    module.num_key_value_groups = HEADS // KV
    found, _ = decode(module, query, key, value, mask, scaling=scaling)
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < 2e-6


@pytest.mark.parametrize("tokens", [1, 3])
def test_capped_scores_are_those_of_gemma_2(tokens):
    query, key, value, mask = case(tokens)
    module = nn.Module().eval()
    module.num_key_value_groups = HEADS // KV
    added = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    expected, _ = eager_attention_forward(module, query, key, value, added, scaling=0.2, softcap=2.0)
    found, _ = decode(module, query, key, value, mask, scaling=0.2, softcap=2.0)
    assert float((found - expected).abs().max()) < 2e-6
