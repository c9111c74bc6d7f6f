"""A loop over the leading dimension of tensors, as one operation of a program: the protocol, and plain torch's form.

On XLA (`runtime/xla_loop.py`) the body is compiled once and runs as a While, so that a program is no longer for more
iterations and what lives inside one iteration is held once. The loop itself is not differentiable; its body may
compute gradients (`torch.enable_grad()` and `torch.autograd.grad` on detached tensors), which is how layers, chunks of
the loss and micro-batches get theirs.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
Body = Callable[[Tensors, Tensors, Tensors], tuple[Tensors, Tensors]]
"""(carry, x, consts) to (carry, y): `x` is one slice of every tensor of `xs`; carry keeps its shapes and types."""


class Loop(Protocol):
    """Runs a body once for every index of the leading dimension of `xs`."""

    def __call__(
        self,
        fn: Body,
        *,
        carry: Tensors,
        xs: Tensors,
        consts: Tensors = (),
        reverse: bool = False,
        rows: int | None = None,
    ) -> tuple[Tensors, Tensors]:
        """The last carry, and every y stacked along a new leading dimension, in the order of `xs`.

        Args:
            fn: the body, called without gradient tracking. It must compute from its arguments alone: a tensor that it
                closes over is computed again in every iteration, unless it is data on the device.
            carry: handed from one iteration to the next.
            xs: at least one tensor; all have the same leading dimension, which is at least 1.
            consts: the same in every iteration.
            reverse: from the last index to the first; the order of the stacked ys stays that of `xs`.
            rows: of the values that the loop works on, where there are such: a y whose first dimension is a multiple of
                it holds so many, and lies on the devices as they do.
        """


def python_loop(
    fn: Body,
    *,
    carry: Tensors,
    xs: Tensors,
    consts: Tensors = (),
    reverse: bool = False,
    rows: int | None = None,
) -> tuple[Tensors, Tensors]:
    """The loop in plain torch, on any device."""
    num = length_of(xs)
    ys: list[Tensors] = []
    with torch.no_grad():
        carry, consts = detached(carry), detached(consts)
        for index in reversed(range(num)) if reverse else range(num):
            carry, y = fn(carry, tuple(x[index].detach() for x in xs), consts)
            carry = detached(carry)
            ys.append(detached(y))
        ordered = reversed(ys) if reverse else ys
        return carry, tuple(torch.stack(slices) for slices in zip(*ordered, strict=True))


def detached(tensors: Tensors) -> Tensors:
    """The same values outside of autograd's graph."""
    return tuple(tensor.detach() for tensor in tensors)


def length_of(xs: Tensors) -> int:
    """Iterations of a loop over `xs`.

    Raises:
        ValueError: no tensor, no iteration, or leading dimensions that differ.
    """
    lengths = {len(x) for x in xs}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"xs={[tuple(x.shape) for x in xs]}; a loop needs tensors of one leading dimension >= 1")
    return lengths.pop()
