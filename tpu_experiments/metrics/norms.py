"""Norms of gradients and updates by the kind of module they belong to, inside the training program."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

KINDS = (
    ("attention", ("self_attn", "attn", "attention")),
    ("mlp", ("mlp", "feed_forward", "ffn")),
    ("embeddings", ("embed_tokens", "wte", "embeddings")),
    ("head", ("lm_head",)),
)
"""Group, and the parts of a parameter's name that select it; the rest (norms, scales) is `other`."""


def group_of(name: str) -> str:
    """Return the group of a parameter, whether it is an adapter, a stack of layers or neither.

    >>> group_of("model.layers.0:32:1.self_attn.q_proj.lora_A")
    'attention'
    """
    parts = set(name.split("."))
    return next((group for group, owned in KINDS if parts.intersection(owned)), "other")


def grouped(names: Sequence[str]) -> dict[str, list[str]]:
    """Return names by group, in the order of `KINDS`, without empty groups."""
    order = [*(group for group, _ in KINDS), "other"]
    members: dict[str, list[str]] = {group: [] for group in order}
    for name in names:
        members[group_of(name)].append(name)
    return {group: found for group, found in members.items() if found}


def group_norms(tensors: Sequence[Mapping[str, Tensor]], groups: Mapping[str, Sequence[str]]) -> Tensor:
    """Return the Euclidean norm of each group in each mapping, (mappings, groups)."""
    return torch.stack(
        [
            torch.stack([torch.stack([each[name].square().sum() for name in names]).sum() for names in groups.values()])
            for each in tensors
        ]
    ).sqrt()


def changes(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what an update adds to each tensor."""
    return {name: after[name] - tensor for name, tensor in before.items()}
