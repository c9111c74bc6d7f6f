"""Mixture of experts with static shapes: every expert computes every token.

transformers' implementations sort tokens by expert or find out which experts were hit. These are counts that depend on
the data, for each of which XLA compiles anew, or a gather of weights per token. Here a token's weight is 0 for the
experts it was not routed to, so the result is the same; the arithmetic is that of all experts, num_experts /
num_experts_per_tok times the routed one (Mixtral 4, GPT-OSS 20B 8, Qwen3 30B 16).

Legend: S tokens, K experts of a token, E experts, D hidden, F intermediate.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tpu_experiments.config.errors import ConfigError

EVERY_EXPERT = "every_expert"
"""Key in transformers' table of expert implementations."""


def every_expert(module: nn.Module, hidden_SD: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the experts of one layer, with the signature that transformers calls.

    Args:
        top_k_index: experts that each token is routed to (S, K).
        top_k_weights: their routing weights (S, K).

    Returns:
        (S, D), in the data type of `hidden_SD`.

    Raises:
        ConfigError: the experts have a norm behind them or are split over devices by transformers.
    """
    experts: Any = module
    if experts.has_post_expert_norm or experts._is_expert_parallel:
        raise ConfigError(
            f"{type(module).__name__} normalises what its experts give, which is not built here; take another model."
        )
    is_chosen = F.one_hot(top_k_index, experts.num_experts).to(top_k_weights.dtype)
    weights_SE = (is_chosen * top_k_weights[..., None]).sum(dim=1).to(hidden_SD.dtype)
    first, second = ("gate_up_proj" if experts.has_gate else "up_proj"), "down_proj"
    spec = "sd,edf->esf" if experts.is_transposed else "sd,efd->esf"
    high_ESF = torch.einsum(spec, hidden_SD, getattr(experts, first))
    if experts.has_bias:
        high_ESF = high_ESF + getattr(experts, f"{first}_bias")[:, None]
    high_ESF = experts._apply_gate(high_ESF) if experts.has_gate else experts.act_fn(high_ESF)
    spec = "esf,efd->sd" if experts.is_transposed else "esf,edf->sd"
    out_SD = torch.einsum(spec, high_ESF * weights_SE.t()[..., None], getattr(experts, second))
    if experts.has_bias:
        out_SD = out_SD + weights_SE @ getattr(experts, f"{second}_bias")
    return out_SD.to(hidden_SD.dtype)


ALL_EXPERTS_FUNCTIONS.register(EVERY_EXPERT, every_expert)
