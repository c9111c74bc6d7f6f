"""Mixture of experts with static shapes: tokens sorted by expert, or every expert computes every token.

transformers' implementations find out which experts were hit, or how many tokens each has: shapes that depend on the
data, for each of which XLA compiles anew. On a TPU tokens are sorted by expert here and multiplied in groups, of which
only the bounds are data (runtime/kernels/grouped.py); no token is left out, whatever the router chose. Other devices,
and tokens that do not divide into the kernel's tiles (a few prompts), compute every expert with weight 0 where the
router did not choose it: the same result, with num_experts / num_experts_per_tok times the arithmetic (Mixtral 4,
GPT-OSS 20B 8, Qwen3 30B 16).

Legend: S tokens, K experts of a token, R = S K rows, E experts, D hidden, F intermediate.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.runtime.kernels.grouped import (
    expert_order,
    grouped_outer,
    grouped_product,
    grouped_products,
    rows_at,
)
from tpu_experiments.runtime.stacked import OF_PARAMETERS

STATIC = "static_shapes"
"""Key in transformers' table of expert implementations."""


def experts_of(module: nn.Module, hidden_SD: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
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
    products = grouped_products()
    parts = products.parts_of(len(hidden_SD), of_token=top_k_index.shape[1]) if products is not None else 0
    if parts:
        return routed(experts, hidden_SD, top_k_index, top_k_weights, parts=parts)
    return every_expert(experts, hidden_SD, top_k_index, top_k_weights)


def routed(experts: Any, hidden_SD: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, parts: int) -> Tensor:
    """Compute the experts that each token is routed to, with tokens sorted by expert in each of some parts."""
    number = top_k_index.shape[1]
    order, place, sizes = expert_order(top_k_index.int(), experts.num_experts, parts)
    weights_R1 = top_k_weights.to(hidden_SD.dtype).reshape(-1, 1)
    weights_R1 = _Moved.apply(weights_R1, order, place, 1, parts)
    rows_RD = _Moved.apply(hidden_SD, order, place, number, parts)
    first, second = ("gate_up_proj" if experts.has_gate else "up_proj"), "down_proj"
    contracted, adapters = (1 if experts.is_transposed else 2), adapters_of(experts)
    high_RF = grouped(rows_RD, getattr(experts, first), sizes, contracted)
    if first in adapters:
        high_RF = high_RF + adapters[first].of_sorted(rows_RD, sizes)
    chosen_RE = None
    if experts.has_bias:
        chosen_RE = F.one_hot(top_k_index.reshape(-1), experts.num_experts).to(hidden_SD.dtype)
        chosen_RE = rows_at(chosen_RE, order, parts)
        high_RF = high_RF + chosen_RE @ getattr(experts, f"{first}_bias").to(high_RF.dtype)
    high_RF = experts._apply_gate(high_RF) if experts.has_gate else experts.act_fn(high_RF)
    high_RF = high_RF * weights_R1
    out_RD = grouped(high_RF, getattr(experts, second), sizes, contracted)
    if second in adapters:
        out_RD = out_RD + adapters[second].of_sorted(high_RF, sizes)
    if chosen_RE is not None:
        out_RD = out_RD + chosen_RE @ getattr(experts, f"{second}_bias").to(out_RD.dtype) * weights_R1
    out_RD = _Moved.apply(out_RD, place, order, 1, parts)
    return _sum_of_choices(out_RD, number)


class Adapter(Protocol):
    """What an adapter of one matrix of each expert adds (models/adapters/experts.py)."""

    def of_sorted(self, x_RK: Tensor, sizes: Tensor) -> Tensor:
        """Return (R, N) of rows that are sorted by expert."""

    def of_each(self, x_SK: Tensor) -> Tensor:
        """Return (E, S, N) of tokens that every expert computes."""

    def summed(self, x_ESK: Tensor) -> Tensor:
        """Return (S, N), the sum over experts of each one's own values."""


def adapters_of(experts: nn.Module) -> Mapping[str, Adapter]:
    """Return the adapters of the experts of a layer by the names of their matrices."""
    found = getattr(experts, OF_PARAMETERS, None)
    return {} if found is None else dict(found.items())


class _Moved(Function):
    """Rows in another order: each choice's token for its place, or each choice's row for its token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, number: int, parts: int) -> Tensor:
        """Take rows of x, of which each is there for `number` choices."""
        ctx.number, ctx.parts = number, parts
        ctx.save_for_backward(inverse)
        return rows_at(x, index // number if number > 1 else index, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return _sum_of_choices(rows_at(grad, inverse, ctx.parts), ctx.number), None, None, None, None


def _sum_of_choices(rows_RD: Tensor, number: int) -> Tensor:
    """Return (S, D), sums in float32 of the `number` rows of each token."""
    if number == 1:
        return rows_RD
    return rows_RD.unflatten(0, (-1, number)).sum(1, dtype=torch.float32).to(rows_RD.dtype)


def grouped(x: Tensor, weight: Tensor, sizes: Tensor, contracted: int) -> Tensor:
    """Multiply sorted rows by their experts' matrices (`grouped_product`), in the data type of `x`.

    The gradient of the matrices is summed in their own data type.
    """
    out: Tensor = _Grouped.apply(x, weight, sizes, contracted)
    return out


class _Grouped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: Tensor, contracted: int) -> Tensor:
        ctx.contracted = contracted
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, sizes)
        return grouped_product(x, weight.to(x.dtype), sizes, contracted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, sizes = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = grouped_product(grad, weight.to(grad.dtype), sizes, 3 - ctx.contracted)
        if ctx.needs_input_grad[1]:
            pair = (x, grad) if ctx.contracted == 1 else (grad, x)
            of_weight = grouped_outer(*pair, sizes, weight.dtype)
        return of_x, of_weight, None, None


def every_expert(experts: Any, hidden_SD: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute every expert for every token, with weight 0 for the experts that it was not routed to."""
    is_chosen = F.one_hot(top_k_index, experts.num_experts).to(top_k_weights.dtype)
    weights_SE = (is_chosen * top_k_weights[..., None]).sum(dim=1).to(hidden_SD.dtype)
    first, second = ("gate_up_proj" if experts.has_gate else "up_proj"), "down_proj"
    spec, adapters = ("sd,edf->esf" if experts.is_transposed else "sd,efd->esf"), adapters_of(experts)
    high_ESF = torch.einsum(spec, hidden_SD, getattr(experts, first))
    if first in adapters:
        high_ESF = high_ESF + adapters[first].of_each(hidden_SD)
    if experts.has_bias:
        high_ESF = high_ESF + getattr(experts, f"{first}_bias")[:, None]
    high_ESF = experts._apply_gate(high_ESF) if experts.has_gate else experts.act_fn(high_ESF)
    spec = "esf,efd->sd" if experts.is_transposed else "esf,edf->sd"
    high_ESF = high_ESF * weights_SE.t()[..., None]
    out_SD = torch.einsum(spec, high_ESF, getattr(experts, second))
    if second in adapters:
        out_SD = out_SD + adapters[second].summed(high_ESF)
    if experts.has_bias:
        out_SD = out_SD + weights_SE @ getattr(experts, f"{second}_bias")
    return out_SD.to(hidden_SD.dtype)


ALL_EXPERTS_FUNCTIONS.register(STATIC, experts_of)
