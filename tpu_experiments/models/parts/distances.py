"""DeBERTa's attention to distances by products with ones and zeros, in the place of its gathers.

A score of query i and key j has parts that depend on the distance of the two, q_i . P[f(i - j)] and k_j . Q[f(i - j)]
(arXiv 2006.03654, section 3.1). transformers multiplies by all K distances and gathers. A TPU gathers number by number,
and XLA does not split the gradient of a gather by rows: it is summed over all chips. To pick one of K numbers is a
product with a one and zeros, which is what a TPU is made for: exact in bf16, and float32 is rounded to bf16 as in all
of a TPU's products. Figures are in tests/benchmarks/RESULTS.md.

Legend: B rows times heads, T tokens, K distances."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

from tpu_experiments.runtime.dynamic_type import XLA_DEVICES

MAX_ONES = 2**28
"""Largest T x T x K of ones and zeros, 268 MB as booleans: 724 tokens and 512 distances. Longer rows are gathered."""


class DistanceAttention(DisentangledSelfAttention):
    """transformers' attention, with distances picked by products; parameters and their names are the same."""

    def disentangled_attention_bias(self, *given: Any, **named: Any) -> Tensor:
        """Return what distances add to the scores (B, T, T)."""
        with _Picking():
            bias: Tensor = super().disentangled_attention_bias(*given, **named)
        return bias


def pick_by_products(module: nn.Module) -> None:
    """Have every DeBERTa attention of a model pick distances by products, in place."""
    for part in module.modules():
        if type(part) is DisentangledSelfAttention:
            part.__class__ = DistanceAttention


def picked(values_BTK: Tensor, index_TJ: Tensor) -> Tensor:
    """Return values[b, t, index[t, j]] as (B, T, J)."""
    out: Tensor = _Picked.apply(values_BTK, index_TJ)
    return out


class _Picked(Function):
    """Computes the ones and zeros in the backward pass again; a folded layer would save them, 268 MB in bf16."""

    @staticmethod
    def forward(ctx: Any, values_BTK: Tensor, index_TJ: Tensor) -> Tensor:
        ctx.save_for_backward(index_TJ)
        ctx.num = values_BTK.shape[-1]
        ones_TKJ = _ones(index_TJ, ctx.num, values_BTK.dtype)
        return torch.bmm(values_BTK.transpose(0, 1), ones_TKJ).transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTJ: Tensor) -> tuple[Tensor, None]:
        (index_TJ,) = ctx.saved_tensors
        ones_TKJ = _ones(index_TJ, ctx.num, grad_BTJ.dtype)
        return torch.bmm(grad_BTJ.transpose(0, 1), ones_TKJ.transpose(1, 2)).transpose(0, 1), None


def _ones(index_TJ: Tensor, num: int, dtype: torch.dtype) -> Tensor:
    """Return 1 at (t, index[t, j], j) and 0 elsewhere, (T, K, J)."""
    distances_K = torch.arange(num, device=index_TJ.device)
    return (index_TJ[:, None] == distances_K[:, None]).to(dtype)


class _Picking(TorchFunctionMode):
    """Replaces `torch.gather`, whose index is the same for all rows and heads: it is expanded from (1, T, T).

    Also `Tensor.repeat` of the heads for every row: torch_xla puts its result together from one piece a row.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, `picked` for a gather, or expand for repeat."""
        named = kwargs or {}
        if function is torch.Tensor.repeat and args[0].device.type in XLA_DEVICES:
            heads, times, *others = args
            if isinstance(times, int) and all(number == 1 for number in others):
                return heads[None].expand(times, *heads.shape).flatten(0, 1)
        if function is not torch.gather or args[0].device.type not in XLA_DEVICES:
            return function(*args, **named)
        (values,), index = args, named["index"]
        if index.shape[1:].numel() * values.shape[-1] > MAX_ONES:
            return function(*args, **named)
        return picked(values, index[0])
