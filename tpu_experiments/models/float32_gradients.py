"""Gradients of float32 weights in float32 where a model computes in bf16.

Autograd gives a weight that was cast to bf16 a bf16 gradient. Each is rounded then before micro-batches are added, and
before devices are: XLA's partitioner sums over devices what a product gives, in the data type that it gives. (Compiled
for v6e-8, 160 of the 448 gradients of Mistral 7B's adapters were summed in bf16, and all of a small model's.) Here the
factors of a weight's gradient are turned to float32 first. A TPU multiplies float32 as bf16 by default, which takes
nothing off numbers that come from bf16, and its compiler leaves the turning out.
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

ADAPTERS = (".lora_A", ".lora_B")
"""Ends of the names of weights that their module takes in float32 and casts itself (models/lora.py)."""
FACTORS = {torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.mul}


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply as F.linear does, in the data type of `x`: (..., in), (out, in) to (..., out).

    The gradients of `weight` and `bias` have their own data types, and are summed over tokens in them.
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
            rows.to(weight.dtype).T @ x.flatten(0, -2).to(weight.dtype) if of_weight else None,
            rows.to(ctx.bias_dtype).sum(0) if of_bias else None,
        )


@contextmanager
def cast_weights(weights: Mapping[str, Tensor], *, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """The weights as modules compute with them: all but adapters in `dtype`.

    While it lasts, float32 weights that are used through their casts get float32 gradients.
    """
    cast = {name: w if name.endswith(ADAPTERS) else w.to(dtype) for name, w in weights.items()}
    changed = {id(cast[name]): w for name, w in weights.items() if cast[name] is not w}
    if changed and torch.is_grad_enabled():
        with _UsedInFloat32(changed):
            yield cast
    else:
        yield cast


class _UsedInFloat32(TorchFunctionMode):
    """Operations with a cast weight, differentiated by the weight itself.

    They are those that decoders of transformers use weights in: linear layers, embeddings, and factors of norms. What
    any other gives a cast weight is in the data type of the cast.
    """

    def __init__(self, weights: Mapping[int, Tensor]) -> None:
        """`weights` by the id of their casts, which must outlive this."""
        super().__init__()
        self._weights = weights

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The result of `func`, to the bit."""
        given = kwargs or {}
        own = [self._weights.get(id(arg)) for arg in args]
        if func is F.linear and own[1] is not None and not given:
            weights = (arg if weight is None else weight for arg, weight in zip(args[1:], own[1:], strict=True))
            return product(args[0], *weights)
        if func is F.embedding and own[1] is not None:
            return func(args[0], own[1], *args[2:], **given).to(args[1].dtype)
        if func in FACTORS and not given and (own[0] is None) != (own[1] is None):
            return func(*_spread(args, own))
        if func is torch.Tensor.float and own[0] is not None:
            return own[0] + (func(args[0]) - own[0]).detach()
        return func(*args, **given)


def _spread(factors: tuple[Any, ...], weights: list[Tensor | None]) -> tuple[Any, ...]:
    """The factor that is a weight, expanded to the product's shape before it is cast: its gradient is summed after."""
    shape = torch.broadcast_shapes(*(f.shape for f in factors if isinstance(f, Tensor)))
    return tuple(f if w is None else w.expand(shape).to(f.dtype) for f, w in zip(factors, weights, strict=True))
