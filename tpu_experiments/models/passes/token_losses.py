"""Next-token losses of every token, each with a gradient of its own, from hidden states (models/passes/loss.py).

What is made of a row's tokens afterwards is the objective's affair: sums of documents, ratios, clipping. With a frozen
head the gradient for a weight of 1 per token is computed beside the losses and saved; backward multiplies it with each
token's. A trained head computes the logits of a chunk again in backward, for both gradients.
Legend: B rows, T tokens, C tokens of a chunk, N chunks, H hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpu_experiments.models.passes.loss import (
    Terms,
    _Chunk,
    _joined,
    _loop_inputs,
    gradient_of_rows,
    gradients_by_token,
    slopes_of_rows,
    trained_rows,
)
from tpu_experiments.runtime.ops import BY_ROWS, LoopCall, Tensors


def chunked_token_losses(hidden_BTH: Tensor, head_VH: Tensor, targets_BT: Tensor, *, terms: Terms) -> Tensor:
    """Return the loss of every position (B, T) in nats, which may be differentiated once, by any gradient (B, T).

    Args:
        hidden_BTH: input of the head; its data type is that of the products with the vocabulary.
        head_VH: receives its gradient where it requires one, summed over the chunks in float32.
    """
    inputs = (hidden_BTH, head_VH, targets_BT, terms)
    if not torch.is_grad_enabled() or not (hidden_BTH.requires_grad or head_VH.requires_grad):
        return _losses(*inputs, has_gradient=False)[0]
    is_trained = head_VH.requires_grad and terms.rows_N is None
    losses_BT: Tensor = (_TrainedHead if is_trained else _FrozenHead).apply(*inputs)
    return losses_BT


def _losses(
    hidden_BTH: Tensor, head_VH: Tensor, targets_BT: Tensor, terms: Terms, *, has_gradient: bool
) -> tuple[Tensor, ...]:
    """Return losses (B, T), and gradients (B, T, H) for a weight of 1 or the log-partition (B, T).

    With gradients of a head of which some rows are trained, their slopes (B, T, N) too.
    """

    def body(carry: Tensors, x: Tensors, consts: Tensors) -> tuple[Tensors, Tensors]:
        chunk = _Chunk(x[0], *consts[:2], targets_BC=x[1], terms=terms)
        slopes = slopes_of_rows(x, consts[2:], log_z_BC=chunk.log_z_BC, terms=terms)
        return (carry[0],), (chunk.losses(), chunk.gradient(x[2]) if has_gradient else chunk.log_z_BC, *slopes)

    ones_BT = torch.ones_like(targets_BT, dtype=torch.float32)
    xs, consts = _loop_inputs(hidden_BTH, head_VH, targets_BT, ones_BT, terms)
    consts += trained_rows(head_VH, terms, dtype=hidden_BTH.dtype) if has_gradient else ()
    carry = (torch.zeros_like(ones_BT[:, 0]),)
    _, found = terms.loop(LoopCall(body, carry=carry, xs=xs, consts=consts, rows=hidden_BTH.shape[0]))
    return tuple(_joined(each, hidden_BTH.shape[1]) for each in found)


class _FrozenHead(torch.autograd.Function):
    """Losses and gradients of the hidden states in one pass."""

    @staticmethod
    def forward(ctx: Any, hidden_BTH: Tensor, head_VH: Tensor, targets_BT: Tensor, terms: Terms) -> Tensor:
        losses_BT, unit_BTH, *slopes = _losses(hidden_BTH, head_VH, targets_BT, terms, has_gradient=True)
        more = [*slopes, hidden_BTH] if slopes else []
        ctx.save_for_backward(terms.constrain(unit_BTH, axes=BY_ROWS), *more)
        ctx.head, ctx.rows_N = torch.empty_like(head_VH, device="meta"), terms.rows_N
        return losses_BT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BT: Tensor) -> tuple[Tensor | None, ...]:
        unit_BTH, *more = ctx.saved_tensors
        # In float32: a token's gradient rounded to bf16 would scale it by up to 0.2 %.
        grad_BTH, grad_VH = (unit_BTH.float() * grad_BT[..., None]).to(unit_BTH.dtype), None
        if more:
            slopes_BTN, hidden_BTH = more
            grad_VH = gradient_of_rows(slopes_BTN, grad_BT.float(), hidden_BTH, like=ctx.head, rows_N=ctx.rows_N)
        return grad_BTH, grad_VH, None, None


class _TrainedHead(torch.autograd.Function):
    """The losses; backward recomputes the logits of each chunk, for both gradients."""

    @staticmethod
    def forward(ctx: Any, hidden_BTH: Tensor, head_VH: Tensor, targets_BT: Tensor, terms: Terms) -> Tensor:
        losses_BT, log_z_BT = _losses(hidden_BTH, head_VH, targets_BT, terms, has_gradient=False)
        ctx.terms = terms
        ctx.save_for_backward(hidden_BTH, head_VH, targets_BT, log_z_BT)
        return losses_BT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BT: Tensor) -> tuple[Tensor | None, ...]:
        hidden_BTH, head_VH, targets_BT, log_z_BT = ctx.saved_tensors
        grads_BT = grad_BT.float()
        return *gradients_by_token(hidden_BTH, head_VH, targets_BT, grads_BT, log_z_BT, terms=ctx.terms), None, None
