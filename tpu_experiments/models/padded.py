"""Frozen weights padded to hold their adapter, so that one product computes W x and B A x.

A product with B reads r numbers of a token and writes all outputs: 117 us on a v6e chip for Mistral 7B's gate_proj and
2,048 tokens, where the frozen product takes 285, and both in one 302 (tests/benchmarks/README.md, "Padded weights").
To multiply (W, B) by (x, A x), they must lie beside each other, and a copy of W for each product costs what is gained.
So W is stored with PADDING more columns, and a step writes B there, into the buffer that W is in. In the same way the
gradient of down_proj's input is one product, with A below W.

In a loop over layers it is the stack of the layers' weights that is written into. A weight that is sharded, and that
such a loop gathers (ZeRO-3), is written where it is gathered: its shards have zeros there.

Only a training step reads the padding, after it has written there. All else reads W, as a slice; in a loop, where that
would be a copy, it multiplies the padding by zeros. Legend: K input features, N output features, r rank.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tpu_experiments.models.contracted import summed_over
from tpu_experiments.runtime.kernels.contraction import contraction
from tpu_experiments.runtime.ops import apart

PADDING = 128
"""Columns or rows added to a weight: the lanes of a TPU."""
MIN_FEATURES = 2048
"""Features of a weight's narrow side from which it is padded. Gemma 3 270M (640) gains nothing: it copies its small
weights, 75,741 tokens/s and 75,830 padded."""
_weights: ContextVar[Mapping[str, Tensor] | None] = ContextVar("weights", default=None)


@contextmanager
def with_adapters(weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Let adapters inside the block compute with these weights, by the adapter's path, which hold A or B."""
    token = _weights.set(weights)
    try:
        yield
    finally:
        _weights.reset(token)


def weights_with_adapters() -> Mapping[str, Tensor]:
    """Return what `with_adapters` was given; nothing outside."""
    return _weights.get() or {}


def beside(joined: Tensor, x: Tensor, low: Tensor, weight: Tensor, b: Tensor, *, in_loop: bool = False) -> Tensor:
    """Multiply (x, A x) by a weight that holds B beside W, to (..., N).

    Args:
        joined: x, and in its padding the values that B's columns multiply, (..., K + PADDING).
        x: (..., K).
        low: A x, (..., r).
        weight: (N, K + PADDING), frozen.
        b: B in float32, (N, r), for its gradient.
        in_loop: whether the weight is cut out of a stack, from which XLA cuts W with a copy of its own. The gradients
            of x and A x are then one product with all of it, that of `joined` (Mistral 7B on v6e-8, folded: 0.585
            instead of 0.672 s a step); unrolled that loses (0.534 instead of 0.512 s).
    """
    joined, x, low = (joined, x.detach(), low.detach()) if in_loop else (joined.detach(), x, low)
    out: Tensor = _Beside.apply(joined, x, low, weight, b)
    return out


def below(x: Tensor, weight: Tensor, a: Tensor, *, outputs: int, in_loop: bool = False) -> tuple[Tensor, Tensor]:
    """Multiply (..., K) by a frozen weight (N + PADDING, K) that holds A below W, to (..., N), and by A, to (..., r).

    The gradient of x is one product.
    """
    out: tuple[Tensor, Tensor] = _Below.apply(x, weight, a, outputs, not in_loop)
    return out


class _Beside(Function):
    @staticmethod
    def forward(ctx: Any, joined: Tensor, x: Tensor, low: Tensor, weight: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(low, weight, b)
        ctx.inputs = x.shape[-1]
        return contraction(joined, weight, [joined.ndim - 1], [1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        low, weight, b = ctx.saved_tensors
        features = [grad.ndim - 1]
        of_b = summed_over(list(range(grad.ndim - 1)), grad, low, dtype=b.dtype)
        if ctx.needs_input_grad[0]:
            return contraction(grad, weight, features, [0]), None, None, None, of_b
        of_x = contraction(grad, weight[:, : ctx.inputs], features, [0])
        return None, of_x, contraction(grad, b.to(grad.dtype), features, [0]), None, of_b


class _Below(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, outputs: int, is_apart: bool) -> tuple[Tensor, Tensor]:
        # The activation is written once, as the product with up_proj ends; else each of its three readers, dA among
        # them, computes it again. A barrier before its gradient too would keep that out of the product with W and A.
        # In a loop that product writes into a stack, and the activation would be a pass of its own, 215 us a layer.
        x = apart(x) if is_apart else x
        ctx.save_for_backward(x, weight, a)
        features = [x.ndim - 1]
        return contraction(x, weight[:outputs], features, [1]), contraction(x, a.to(x.dtype), features, [1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, of_low: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a = ctx.saved_tensors
        empty = len(weight) - grad.shape[-1] - of_low.shape[-1]
        joined = torch.cat([grad, F.pad(of_low, (0, empty))], dim=-1)
        # With a sum behind it XLA computes the gradients of gate_proj's and up_proj's outputs as the product ends, else
        # in a pass of their own: 251 us a layer, 22 ms of a step of Mistral 7B on v6e-8. What is added is 0, or NaN
        # where the gradient is not finite, so that the step is skipped with and without it. It is a number of the same
        # token: one of another chip's would cost an all-reduce a layer, 128 in that step, for 0.2 % of its estimate.
        of_x = contraction(joined, weight, [grad.ndim - 1], [0]) + of_low[..., :1] * 0
        return of_x, None, summed_over(list(range(grad.ndim - 1)), of_low, x, dtype=a.dtype), None, None
