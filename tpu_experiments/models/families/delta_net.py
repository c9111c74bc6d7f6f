"""Gated DeltaNet layers for packed rows on torch_xla: transformers' modules with a forward pass of their own.

Qwen 3.5 and Qwen 3 Next, dense or with experts, have three such layers for each one of attention; OLMo Hybrid has them
too. Names, shapes and random weights are those of transformers' classes (5.23), and so are all other modules of the
model. Their own forward pass carries convolution and state from one document of a row to the next, and solves
triangular systems on the host. The rule is in models/families/gated_delta.py. Legend as there, H hidden."""

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.models.families.gated_delta import Rule, causal_convolution, one_token, over_rows, with_last_state

KEPT = ("layer_idx", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size", "activation")
"""Attributes of transformers' modules that are read here."""


class StateCache(Protocol):
    """Cache that keeps tensors of a layer beside keys and values of others (models/passes/generation.py)."""

    def state(self, layer_idx: int) -> tuple[Tensor, ...] | None:
        """Return what a layer has kept; None before the first call, which reads whole prompts."""

    def keep(self, layer_idx: int, tensors: tuple[Tensor, ...]) -> None:
        """Replace what a layer keeps."""


class Projected(NamedTuple):
    """What the projections of a layer make of its input."""

    mixed_BTC: Tensor
    """Queries, keys and values of all heads, before the convolution."""
    gate_BTNE: Tensor
    rate_BTN: Tensor
    """Learning rate, in (0, 1) or (0, 2)."""
    decay_BTN: Tensor
    """Step of the decay before softplus and bias."""


class DeltaNet(nn.Module):
    """One layer's convolution, rule and gate, of transformers' parts under their names (Qwen 3.5)."""

    norm_name, out_name = "norm", "out_proj"

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        for name in KEPT:
            setattr(self, name, getattr(whole, name))
        for name, parameter in whole.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, part in whole.named_children():
            self.add_module(name, part)

    def project(self, hidden_BTH: Tensor) -> Projected:
        """Return what the input projections make of hidden states."""
        own: Any = self
        gate_BTNE = own.in_proj_z(hidden_BTH).unflatten(-1, (-1, own.head_v_dim))
        rate_BTN = own.in_proj_b(hidden_BTH).sigmoid()
        return Projected(own.in_proj_qkv(hidden_BTH), gate_BTNE, rate_BTN, own.in_proj_a(hidden_BTH))

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: StateCache | None = None,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Map (B, T, H) to (B, T, H), with the signature that transformers' layer calls.

        Args:
            cache_params: keeps the last tokens before the convolution, and the state.
            attention_mask: numbers of documents (B, T); not read for the next token of a cache that has a state.
        """
        own: Any = self
        projected = self.project(hidden_states)
        kept = None if cache_params is None else cache_params.state(own.layer_idx)
        mixed_BTC, num_tokens = projected.mixed_BTC, hidden_states.shape[1]
        if attention_mask is None:
            attention_mask = torch.ones_like(mixed_BTC[..., 0], dtype=torch.int32)
        segments_BT, reach = attention_mask, own.conv_kernel_size - 1
        if kept is not None:
            mixed_BTC = torch.cat([kept[0], mixed_BTC], dim=1)
            segments_BT = torch.cat([torch.ones_like(kept[0][..., 0], dtype=segments_BT.dtype), segments_BT], dim=1)
        convolved_BTC = causal_convolution(mixed_BTC, own.conv1d.weight.squeeze(1), segments_BT)[:, -num_tokens:]
        rule = self.rule(ACT2FN[own.activation](convolved_BTC).to(mixed_BTC.dtype), projected)
        if cache_params is None:
            made_BNTE = over_rows(rule, segments_BT)
        else:
            made_BNTE, state = with_last_state(rule, segments_BT) if kept is None else one_token(rule, kept[1])
            before_BTC = F.pad(mixed_BTC, (0, 0, reach, 0))[:, -reach:]
            cache_params.keep(own.layer_idx, (before_BTC, state))
        made_BTNE = made_BNTE.transpose(1, 2).to(hidden_states.dtype)
        gated_BTNE = self.get_submodule(self.norm_name)(made_BTNE, projected.gate_BTNE)
        made: Tensor = self.get_submodule(self.out_name)(gated_BTNE.flatten(2))
        return made

    def rule(self, convolved_BTC: Tensor, projected: Projected) -> Rule:
        """Return the inputs of the rule; a head of queries and keys serves consecutive heads of values."""
        own: Any = self
        keys = own.num_k_heads * own.head_k_dim
        query, key, value = convolved_BTC.split([keys, keys, convolved_BTC.shape[-1] - 2 * keys], dim=-1)
        group = own.num_v_heads // own.num_k_heads

        def by_head(tensor: Tensor, width: int, repeats: int) -> Tensor:
            heads_BNTD = tensor.unflatten(-1, (-1, width)).transpose(1, 2)
            if repeats == 1:
                return heads_BNTD
            return heads_BNTD[:, :, None].expand(-1, -1, repeats, -1, -1).flatten(1, 2)

        log_decay_BTN = -own.A_log.float().exp() * F.softplus(projected.decay_BTN.float() + own.dt_bias.float())
        return Rule(
            by_head(query, own.head_k_dim, group),
            by_head(key, own.head_k_dim, group),
            by_head(value, own.head_v_dim, 1),
            log_decay_BTN.transpose(1, 2),
            projected.rate_BTN.transpose(1, 2),
        )


class FusedDeltaNet(DeltaNet):
    """The layer of Qwen 3 Next: two projections, by heads of keys."""

    def project(self, hidden_BTH: Tensor) -> Projected:
        """Return what the input projections make of hidden states."""
        own: Any = self
        group = own.num_v_heads // own.num_k_heads
        values = group * own.head_v_dim
        both = own.in_proj_qkvz(hidden_BTH).unflatten(-1, (own.num_k_heads, -1))
        query, key, value, gate = both.split([own.head_k_dim, own.head_k_dim, values, values], dim=-1)
        rate, decay = own.in_proj_ba(hidden_BTH).unflatten(-1, (own.num_k_heads, -1)).split([group, group], dim=-1)
        mixed_BTC = torch.cat([each.flatten(2) for each in (query, key, value)], dim=-1)
        gate_BTNE = gate.flatten(2).unflatten(-1, (-1, own.head_v_dim))
        return Projected(mixed_BTC, gate_BTNE, rate.flatten(2).sigmoid(), decay.flatten(2))


class OlmoDeltaNet(DeltaNet):
    """The layer of OLMo Hybrid: a projection for each of its inputs, and learning rates up to 2."""

    norm_name, out_name = "o_norm", "o_proj"

    def __init__(self, whole: nn.Module) -> None:
        super().__init__(whole)
        self.rate_scale = 2.0 if whole.allow_neg_eigval else 1.0

    def project(self, hidden_BTH: Tensor) -> Projected:
        """Return what the input projections make of hidden states."""
        own: Any = self
        mixed_BTC = torch.cat([part(hidden_BTH) for part in (own.q_proj, own.k_proj, own.v_proj)], dim=-1)
        gate_BTNE = own.g_proj(hidden_BTH).unflatten(-1, (-1, own.head_v_dim))
        return Projected(
            mixed_BTC, gate_BTNE, self.rate_scale * own.b_proj(hidden_BTH).sigmoid(), own.a_proj(hidden_BTH)
        )


CLASSES: dict[str, type[DeltaNet]] = {
    "Qwen3_5GatedDeltaNet": DeltaNet,
    "Qwen3_5MoeGatedDeltaNet": DeltaNet,
    "Qwen3NextGatedDeltaNet": FusedDeltaNet,
    "OlmoHybridGatedDeltaNet": OlmoDeltaNet,
}
"""Modules by the name of transformers' class that they replace."""
LAYERS = ("linear_attention",)
"""Types of layers that read numbers of documents in the place of a mask, in a config's `layer_types`."""


def with_delta_nets(model: nn.Module) -> None:
    """Replace transformers' Gated DeltaNet modules of a model, in place.

    Raises:
        ConfigError: a layer is of a class that is not known here.
    """
    known = [(name, part) for name, part in model.named_modules() if type(part).__name__ in CLASSES]
    config: Any = model.config
    count = sum(kind in LAYERS for kind in config.layer_types)
    if len(known) != count:
        raise ConfigError(
            f"model.arch.model_type={config.model_type}; {len(known)} of its {count} linear_attention layers are of a "
            f"class that is computed here ({', '.join(CLASSES)}); install the versions of launch/requirements.lock."
        )
    for name, part in known:
        model.set_submodule(name, CLASSES[type(part).__name__](part))
    model.reads_segments_in = LAYERS  # type: ignore[assignment]
