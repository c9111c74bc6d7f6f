"""Gradients of float32 weights in float32 where a model computes in bf16.

Autograd gives a weight that was cast to bf16 a bf16 gradient. It is rounded before micro-batches are added and before
devices are: XLA's partitioner sums the result of a product over devices in the product's data type. (Compiled for
v6e-8, 160 of the 448 gradients of Mistral 7B's adapters were summed in bf16, and all of a small model's.) Here the
operands of a weight's gradient are cast to float32 first. A TPU multiplies float32 as bf16 by default, which loses
nothing for operands that come from bf16, and its compiler removes the casts.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from tpu_experiments.models.parts.contracted import into_heads, out_of_heads, summed_over
from tpu_experiments.runtime.stacked import is_adapter_part, is_side_tensor

OF_HEADS = (into_heads, out_of_heads)
FACTORS = {torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.mul}


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply as F.linear does, in the data type of `x`: (..., in), (out, in) to (..., out).

    The gradients of `weight` and `bias` have the data types of `weight` and `bias`, and are summed over tokens in them.
    """
    out: Tensor = _Product.apply(x, weight, bias)
    return out


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            grad @ weight.to(grad.dtype) if of_x else None,
            _of_weight(rows, x.flatten(0, -2), weight.dtype) if of_weight else None,
            rows.to(ctx.bias_dtype).sum(0) if of_bias else None,
        )


def _of_weight(rows: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    if rows.is_cuda:
        return summed_over([0], rows, x, dtype=dtype)
    return rows.to(dtype).T @ x.to(dtype)


def grouped_product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply group by group, as `product` does: (K, N, in), (K, out, in) to (K, N, out)."""
    out: Tensor = _GroupedProduct.apply(x, weight)
    return out


class _GroupedProduct(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.bmm(x, weight.to(x.dtype).transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        return (
            torch.bmm(grad, weight.to(grad.dtype)) if of_x else None,
            torch.bmm(grad.to(weight.dtype).transpose(1, 2), x.to(weight.dtype)) if of_weight else None,
        )


def is_kept_as_it_is(name: str, weight: Tensor) -> bool:
    """Tell whether the module of a weight takes it in the data type in which it is stored."""
    return is_adapter_part(name) or not weight.is_floating_point() or is_side_tensor(name)


@contextmanager
def cast_weights(weights: Mapping[str, Tensor], *, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Yield the weights as modules compute with them: all but adapters, codes and scales in `dtype`.

    Inside the block, float32 weights that are used through their casts receive float32 gradients.
    """
    cast = {name: w if is_kept_as_it_is(name, w) else w.to(dtype) for name, w in weights.items()}
    changed = {id(cast[name]): w for name, w in weights.items() if cast[name] is not w}
    if changed and torch.is_grad_enabled():
        with _UsedInFloat32(changed):
            yield cast
    else:
        yield cast


class _UsedInFloat32(TorchFunctionMode):
    """Redirects operations on a cast weight, so that they are differentiated by the original weight.

    Covered are the operations in which decoders of transformers use weights: linear layers, embeddings, and factors of
    norms. A gradient through any other operation has the data type of the cast.
    """

    def __init__(self, weights: Mapping[int, Tensor]) -> None:
        """Take the original weights, keyed by the id of their casts, which must outlive this object."""
        super().__init__()
        self._weights = weights

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the result of `func`, bit for bit."""
        given = kwargs or {}
        own = [self._weights.get(id(arg)) for arg in args]
        if own[1:] and own[1] is not None and (func in OF_HEADS or (func is F.linear and not given)):
            weights = (arg if weight is None else weight for arg, weight in zip(args[1:], own[1:], strict=True))
            return (product if func is F.linear else func)(args[0], *weights, **given)
        if func is F.embedding and own[1] is not None:
            return func(args[0], own[1], *args[2:], **given).to(args[1].dtype)
        if func in FACTORS and not given and (own[0] is None) != (own[1] is None):
            return func(*_spread(args, own))
        if func is torch.Tensor.float and own[0] is not None:
            return own[0] + (func(args[0]) - own[0]).detach()
        return func(*args, **given)


def _spread(factors: tuple[Any, ...], weights: list[Tensor | None]) -> tuple[Any, ...]:
    """Expand the factor that is a weight to the product's shape, then cast it.

    In this order the gradient is cast back first, and its sum over the expanded axes is float32.
    """
    shape = torch.broadcast_shapes(*(f.shape for f in factors if isinstance(f, Tensor)))
    return tuple(f if w is None else w.expand(shape).to(f.dtype) for f, w in zip(factors, weights, strict=True))
