"""Loops over the leading dimension of tensors: the protocol, and its implementation in plain torch.

On XLA (`runtime/xla_loop.py`) the body is compiled once and runs as a While, so that neither the program's size nor the
memory of its temporaries grows with the number of iterations. The loop itself is not differentiable; its body may
compute gradients (`torch.enable_grad()` and `torch.autograd.grad` on detached tensors). Layers, chunks of the loss and
micro-batches get their gradients that way.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
Body = Callable[[Tensors, Tensors, Tensors], tuple[Tensors, Tensors]]
"""Maps (carry, x, consts) to (carry, y); `x` is one slice of every tensor of `xs`, carry keeps shapes and types."""


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
        """Return the last carry, and every y stacked along a new leading dimension, in the order of `xs`.

        Args:
            fn: the body, called without gradient tracking. It must compute from its arguments alone: a tensor that it
                closes over is recomputed in every iteration, unless it is data on the device.
            carry: passed from one iteration to the next.
            xs: at least one tensor; all have the same leading dimension, which is at least 1.
            consts: the same in every iteration.
            reverse: iterate from the last index to the first; the stacked ys keep the order of `xs`.
            rows: number of rows in the values that the loop works on, if they have any. A y whose first dimension is a
                multiple of it is sharded over the devices as the rows are.

        Raises:
            ValueError: `xs` is empty or its leading dimensions differ or are 0.
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
    """Run the loop in plain torch, on any device (see `Loop.__call__`)."""
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
    """Return the tensors detached from autograd's graph."""
    return tuple(tensor.detach() for tensor in tensors)


def length_of(xs: Tensors) -> int:
    """Return the number of iterations of a loop over `xs`.

    Raises:
        ValueError: `xs` is empty or its leading dimensions differ or are 0.
    """
    lengths = {len(x) for x in xs}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"xs={[tuple(x.shape) for x in xs]}; a loop needs tensors of one leading dimension >= 1")
    return lengths.pop()
