"""Linear layers as sums over several dimensions: into heads, out of heads, and of an adapter with its frozen weight.

Legend: K input features, N output features, n heads of D features, r rank."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from tpu_experiments.models.parts.named import named
from tpu_experiments.runtime.kernels.contraction import contraction


class LinearOfHeads(nn.Linear):
    """A Linear whose outputs, or inputs, are heads, as attention's kernel reads and writes them."""

    def __init__(self, linear: nn.Linear, *, name: str, input_heads: int = 0, output_heads: int = 0) -> None:
        """Take the parameters of `linear`; one of the numbers of heads is not 0."""
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias, self.leaf = linear.weight, linear.bias, name.rpartition(".")[2]
        self.input_heads, self.output_heads = input_heads, output_heads
        self.names_its_products = bool(output_heads)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        if self.input_heads:
            return out_of_heads(x.unflatten(-1, (self.input_heads, -1)), self.weight, self.bias)
        return named(into_heads(x, self.weight, self.bias, heads=self.output_heads), self.leaf).flatten(-2)


def into_heads(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, heads: int) -> Tensor:
    """Multiply (..., K) by (N, K) and add (N,), into (..., n, D)."""
    given = (x, weight, bias)
    if has_torch_function(given):
        return handle_torch_function(into_heads, given, *given, heads=heads)
    out: Tensor = _Contracted.apply(*given, (heads, len(weight) // heads), (weight.shape[1],))
    return out


def out_of_heads(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply (..., n, D) by (N, n D) and add (N,), to (..., N)."""
    given = (x, weight, bias)
    if has_torch_function(given):
        return handle_torch_function(out_of_heads, given, *given)
    out: Tensor = _Contracted.apply(*given, (len(weight),), tuple(x.shape[-2:]))
    return out


def contracted(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply (..., K) by (N, K), to (..., N), with rows and tokens as they are.

    torch views tokens as one dimension for a product of matrices, and XLA then decides otherwise what it computes while
    it multiplies: a folded step of Qwen2.5 0.5B, r=32 and alpha=32, on v5e-8 takes 0.274 s, and 0.241 s with adapters
    that multiply like this; an unrolled one of Gemma 3 270M 1.046 and 1.020 s (planned).
    """
    out: Tensor = _Contracted.apply(x, weight, None, (len(weight),), (weight.shape[1],))
    return out


def together(x: Tensor, weight: Tensor, b: Tensor, *, first: int = 0) -> Tensor:
    """Multiply (..., K + R), inputs and then low-rank values, by a frozen weight (N, K) and B (N, r), to (..., N).

    B meets r of the R values, from number `first`; the others are of adapters that read the same inputs, so that both
    are put side by side once for all of them. The sum over K + R features is written once, where two products would
    each write N features per token.
    """
    out: Tensor = _Together.apply(x, weight, b, first)
    return out


def forked(x: Tensor, weight: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply (..., K) by a frozen weight (N, K) and by A (r, K), to (..., N) and (..., r).

    The gradient of x, a sum over N + r features, is written once, where two products would each write K features per
    token.
    """
    out: tuple[Tensor, Tensor] = _Forked.apply(x, weight, a)
    return out


def summed_over(tokens: list[int], grad: Tensor, x: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a weight of this data type: the products of grad and x, summed over tokens in it.

    Args:
        tokens: dimensions of both, their first ones.
    """
    if grad.is_cuda and dtype == torch.float32 and grad.dtype == x.dtype in (torch.bfloat16, torch.float16):
        # Products of float32 operands use no tensor cores: 81 of the 1,834 ms of a step of Qwen 0.5B on an H200.
        rows, of = grad.flatten(0, len(tokens) - 1).flatten(1), x.flatten(0, len(tokens) - 1).flatten(1)
        summed: Tensor = torch.ops.aten.mm.dtype(rows.T, of, dtype)
        return summed.view(*grad.shape[len(tokens) :], *x.shape[len(tokens) :])
    return contraction(grad.to(dtype), x.to(dtype), tokens, tokens)


def _last(tensor: Tensor, count: int) -> list[int]:
    return list(range(tensor.ndim - count, tensor.ndim))


class _Contracted(Function):
    """The product of x (..., *inputs) and a weight (N, K), viewed as (*outputs, *inputs), with a bias: (..., *outputs).

    The gradients of weight and bias are summed over tokens in their own data types (models/parts/float32_gradients.py).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, outputs: tuple[int, ...], inputs: tuple[int, ...]
    ) -> Tensor:
        ctx.outputs, ctx.inputs, ctx.bias_dtype = outputs, inputs, None if bias is None else bias.dtype
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        cast = weight.to(x.dtype).view(*outputs, *inputs)
        out = contraction(x, cast, _last(x, len(inputs)), _last(cast, len(inputs)))
        return out if bias is None else out + bias.to(x.dtype).view(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        tokens = list(range(grad.ndim - len(ctx.outputs)))
        if ctx.needs_input_grad[0]:
            cast = weight.to(grad.dtype).view(*ctx.outputs, *ctx.inputs)
            of_x = contraction(grad, cast, _last(grad, len(ctx.outputs)), list(range(len(ctx.outputs))))
        if ctx.needs_input_grad[1]:
            of_weight = summed_over(tokens, grad, x, dtype=weight.dtype).view(weight.shape)
        if ctx.needs_input_grad[2]:
            of_bias = grad.to(ctx.bias_dtype).sum(tokens).flatten()
        return of_x, of_weight, of_bias, None, None


class _Together(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, b: Tensor, first: int) -> Tensor:
        at = weight.shape[1] + first
        ctx.first, ctx.width = first, x.shape[-1]
        ctx.save_for_backward(x[..., at : at + b.shape[1]], weight, b)
        return contraction(x, _beside(weight, b, x.dtype, first=first, width=ctx.width), [x.ndim - 1], [1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        low, weight, b = ctx.saved_tensors
        both = _beside(weight, b, grad.dtype, first=ctx.first, width=ctx.width)
        tokens = list(range(low.ndim - 1))
        of_b = summed_over(tokens, grad, low, dtype=b.dtype)
        return contraction(grad, both, [grad.ndim - 1], [0]), None, of_b, None


class _Forked(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight, a)
        dim = [x.ndim - 1]
        return contraction(x, weight.to(x.dtype), dim, [1]), contraction(x, a.to(x.dtype), dim, [1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, of_low: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a = ctx.saved_tensors
        both = torch.cat([weight.to(grad.dtype), a.to(grad.dtype)])
        of_x = contraction(torch.cat([grad, of_low], -1), both, [grad.ndim - 1], [0])
        tokens = list(range(grad.ndim - 1))
        return of_x, None, summed_over(tokens, of_low, x, dtype=a.dtype)


def _beside(weight: Tensor, b: Tensor, dtype: torch.dtype, *, first: int, width: int) -> Tensor:
    """Return (N, width): the weight, `first` zeros, B, and zeros."""
    last = width - weight.shape[1] - first - b.shape[1]
    return torch.cat([weight.to(dtype), F.pad(b.to(dtype), (first, last))], dim=1)
