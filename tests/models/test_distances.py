"""Distances picked by products with ones and zeros are those that are gathered, and so are their gradients."""

import pytest
import torch
from transformers import DebertaV2Config
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention, build_relative_position

from tpu_experiments.models.parts import distances
from tpu_experiments.models.parts.distances import DistanceAttention, pick_by_products, picked

CONFIG = DebertaV2Config(
    hidden_size=32,
    num_attention_heads=4,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    position_buckets=8,
    max_position_embeddings=64,
    share_att_key=True,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_with_ones_picks_exactly(dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 5, 16, generator=generator).to(dtype).requires_grad_()
    index = torch.randint(0, 16, (5, 7), generator=generator)
    weights = torch.randint(-3, 4, (6, 5, 7), generator=generator).to(dtype)
    found, expected = picked(values, index), torch.gather(values, -1, index.expand(6, -1, -1))
    assert torch.equal(found, expected)
    grads = [torch.autograd.grad((out * weights).sum(), values)[0] for out in (found, expected)]
    assert torch.equal(*grads), "sums of small integers"


@pytest.mark.parametrize(("most", "num_products"), [(2**28, 2), (12 * 12 * 16 - 1, 0)])
def test_attention_is_that_of_transformers(monkeypatch, most, num_products):
    """With products for both kinds of distances; with gathers where ones and zeros would be too many."""
    torch.manual_seed(0)
    plain, ours = DisentangledSelfAttention(CONFIG), torch.nn.Sequential(DisentangledSelfAttention(CONFIG))
    pick_by_products(ours)
    assert type(ours[0]) is DistanceAttention
    ours[0].load_state_dict(plain.state_dict())
    calls = []
    monkeypatch.setattr(distances, "picked", lambda *given: calls.append(given) or picked(*given))
    monkeypatch.setattr(distances, "XLA_DEVICES", ("cpu",))
    monkeypatch.setattr(distances, "MAX_ONES", most)
    hidden = torch.randn(3, 12, 32)
    where = build_relative_position(hidden, hidden, bucket_size=8, max_position=64)
    given = {"relative_pos": where, "rel_embeddings": torch.randn(16, 32)}
    mask = torch.ones(3, 1, 12, 12, dtype=torch.bool)
    outs = [part(hidden, mask, **given)[0] for part in (ours[0], plain)]
    assert len(calls) == num_products
    torch.testing.assert_close(*outs)
    grads = [
        torch.autograd.grad(out.square().sum(), [*part.parameters()])
        for out, part in zip(outs, (ours[0], plain), strict=True)
    ]
    torch.testing.assert_close(*grads)
