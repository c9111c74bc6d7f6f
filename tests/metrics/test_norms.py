"""Norms by the kind of module, for plain names, adapters and stacks of layers."""

import pytest
import torch

from tpu_experiments.metrics.norms import changes, group_norms, group_of, grouped


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.layers.0:32:1.self_attn.q_proj.lora_A", "attention"),
        ("model.layers.3.mlp.down_proj.lora_B", "mlp"),
        ("transformer.h.0.attn.c_attn.weight", "attention"),
        ("model.embed_tokens.weight", "embeddings"),
        ("lm_head.weight", "head"),
        ("model.layers.0.input_layernorm.weight", "other"),
    ],
)
def test_a_name_tells_its_group(name: str, group: str) -> None:
    assert group_of(name) == group


def test_groups_come_in_one_order_and_empty_ones_do_not() -> None:
    names = ["lm_head.weight", "a.mlp.x", "a.self_attn.y", "b.mlp.x"]
    assert list(grouped(names).items()) == [
        ("attention", ["a.self_attn.y"]),
        ("mlp", ["a.mlp.x", "b.mlp.x"]),
        ("head", ["lm_head.weight"]),
    ]


def test_group_norms_are_those_of_the_flattened_tensors() -> None:
    torch.manual_seed(0)
    before = {name: torch.randn(3, 4) for name in ("a.mlp.x", "b.mlp.x", "a.self_attn.y")}
    after = {name: tensor + torch.randn(3, 4) for name, tensor in before.items()}
    groups = grouped(list(before))
    found = group_norms([before, changes(before, after)], groups)
    assert found.shape == (2, 2)
    for column, names in enumerate(groups.values()):
        flat = torch.cat([before[name].flatten() for name in names])
        moved = torch.cat([(after[name] - before[name]).flatten() for name in names])
        assert found[0, column] == pytest.approx(float(flat.norm()), rel=1e-6)
        assert found[1, column] == pytest.approx(float(moved.norm()), rel=1e-6)
