"""Operations of a program that runtimes provide: the loop, sharding constraints, host memory.

The loop runs over the leading dimension of tensors as one operation. On XLA (`runtime/xla/loop.py`) the body is
compiled once and runs as a While, so that a program is no longer for more iterations and what lives inside one
iteration is held once. The loop itself is not differentiable; its body may compute gradients (`torch.enable_grad()`
and `torch.autograd.grad` on detached tensors), which is how layers, chunks of the loss and micro-batches get theirs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tpu_experiments.config.mesh import Axes
from tpu_experiments.config.model_schema import ROWS

Tensors = tuple[Tensor, ...]
Body = Callable[[Tensors, Tensors, Tensors], tuple[Tensors, Tensors]]
"""Maps (carry, x, consts) to (carry, y); `x` is one slice of every tensor of `xs`, carry keeps shapes and types."""


class PlaceTensor(Protocol):
    """Copies a parameter, or a tensor of its shape, to the device (`Runtime.place`)."""

    def __call__(self, tensor: Tensor, *, name: str) -> Tensor:
        """Return the tensor on the device, sharded as the parameter `name`."""


@dataclass(frozen=True)
class LoopCall:
    """A body, and what it runs over: it is called once for every index of the leading dimension of `xs`.

    Raises:
        ValueError: `xs` is empty or its leading dimensions differ or are 0.
    """

    body: Body
    """Called without gradient tracking. It must compute from its arguments alone: a tensor that it closes over is
    recomputed in every iteration, unless it is data on the device."""
    carry: Tensors
    """Passed from one iteration to the next."""
    xs: Tensors
    """At least one tensor; all have the same leading dimension, which is at least 1."""
    consts: Tensors = ()
    """The same in every iteration."""
    reverse: bool = False
    """Iterate from the last index to the first; the stacked ys keep the order of `xs`."""
    rows: int | None = None
    """Number of rows in the values that the loop works on, if they have any. A y whose first dimension is a multiple of
    it is sharded over the devices as the rows are."""

    def __post_init__(self) -> None:
        lengths = {len(x) for x in self.xs}
        if len(lengths) != 1 or 0 in lengths:
            shapes = [tuple(x.shape) for x in self.xs]
            raise ValueError(f"xs={shapes}; a loop needs tensors of one leading dimension >= 1")

    @property
    def order(self) -> Sequence[int]:
        """Return the indices in the order of the iterations."""
        indices = range(len(self.xs[0]))
        return indices[::-1] if self.reverse else indices


Loop = Callable[[LoopCall], tuple[Tensors, Tensors]]
"""Runs a loop; returns the last carry, and every y stacked along a new leading dimension, in the order of `xs`."""


def python_loop(call: LoopCall) -> tuple[Tensors, Tensors]:
    """Run a loop in plain torch, on any device."""
    ys: list[Tensors] = []
    with torch.no_grad():
        carry, consts = detached(call.carry), detached(call.consts)
        for index in call.order:
            carry, y = call.body(carry, tuple(x[index].detach() for x in call.xs), consts)
            carry = detached(carry)
            ys.append(detached(y))
        ordered = reversed(ys) if call.reverse else ys
        return carry, tuple(torch.stack(slices) for slices in zip(*ordered, strict=True))


def detached(tensors: Tensors) -> Tensors:
    """Return the tensors detached from autograd's graph."""
    return tuple(tensor.detach() for tensor in tensors)


BY_ROWS: Axes = (ROWS,)
"""Constraint of a value whose first dimension is rows: sharded by rows, replicated along `tensor`."""
HEAD: Axes = ("tensor",)
"""Constraint of the output head (V, H) during its computation: the vocabulary is sharded along `tensor`."""


class Constrain(Protocol):
    """Sharding constraint on a value. Its numbers do not change; outside spmd it is the identity."""

    def __call__(self, tensor: Tensor, *, axes: Axes) -> Tensor:
        """Return `tensor` with each dimension sharded over its mesh axes and replicated along the others."""


def unconstrained(tensor: Tensor, *, axes: Axes) -> Tensor:
    """Return `tensor` without a constraint."""
    return tensor


def replicated(name: str, shape: tuple[int, ...]) -> Axes:
    """Return no axes: the parameter is replicated."""
    return ()


def in_use(axes: Axes) -> Axes:
    """Return the axes of a weight while its layer is computed.

    It is gathered along every axis except `tensor` (ZeRO-3, arXiv 1910.02054).
    """
    return tuple("tensor" if "tensor" in (axis or ()) else None for axis in axes)


def identity(tensor: Tensor) -> Tensor:
    """Return `tensor` unchanged."""
    return tensor


@torch.library.custom_op("tpu_experiments::apart", mutates_args=())
def apart(tensor: Tensor) -> Tensor:
    """Return a value, and pass its gradient on, behind a barrier that XLA fuses nothing across; elsewhere a copy."""
    return tensor.clone(memory_format=torch.contiguous_format)


@apart.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


apart.register_autograd(lambda ctx, grad: apart(grad))
APART = torch.ops.tpu_experiments.apart.default


@torch.library.custom_op("tpu_experiments::widened", mutates_args=(), device_types="cpu")
def widened(tensor: Tensor, columns: int, parts: int) -> Tensor:
    """Return (..., K + columns) with a tensor (..., K) in it; what else it holds is not defined.

    Args:
        parts: parts that the first dimension is split into over the devices, which each leave theirs uninitialised
            (TPUs can); 0: the columns are filled with 0.
    """
    return F.pad(tensor, (0, columns))


@widened.register_fake
def _(tensor: Tensor, columns: int, parts: int) -> Tensor:
    return tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] + columns)


@torch.library.custom_op("tpu_experiments::written", mutates_args=(), device_types="cpu")
def written(into: Tensor, part: Tensor, at: Sequence[int]) -> Tensor:
    """Return `into` with `part` in it from an index on: XLA writes it in place where nothing reads `into` later."""
    whole = into.clone(memory_format=torch.contiguous_format)
    whole[tuple(slice(start, start + size) for start, size in zip(at, part.shape, strict=True))] = part
    return whole


@written.register_fake
def _(into: Tensor, part: Tensor, at: Sequence[int]) -> Tensor:
    return torch.empty(into.shape, dtype=into.dtype, device=into.device)


@torch.library.custom_op("tpu_experiments::with_slot", mutates_args=(), device_types="cpu")
def with_slot(into: Tensor, part: Tensor, slot: Tensor, dim: int) -> Tensor:
    """Return `into` with `part`, of size 1 along a dimension, at the index `slot` (1,) int32 of that dimension.

    XLA writes it in place where nothing reads `into` later.
    """
    return into.index_copy(dim, slot.long(), part)


@with_slot.register_fake
def _(into: Tensor, part: Tensor, slot: Tensor, dim: int) -> Tensor:
    return torch.empty_like(into)


@dataclass(frozen=True)
class HostMemory:
    """Transfers of an intermediate value to host memory and back; by default it stays on the device."""

    put: Callable[[Tensor], Tensor] = identity
    fetch: Callable[[Tensor], Tensor] = identity


class InPlace(Protocol):
    """Writes into tensors that stay on the device, in their own buffers."""

    kept: dict[str, Tensor]
    """Tensors that one program writes and all may read; the runtime hands every program their current values."""
    uninitialised_parts: int
    """Parts that rows are split into where columns may be uninitialised (`widened`); 0: they are filled with 0."""

    def is_whole(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether every device has the whole parameter of this name: parts of others cannot be written."""

    def is_gathered(self, name: str, shape: tuple[int, ...], *, along: int) -> bool:
        """Return whether a loop over layers gathers the whole parameter, which is not split along a dimension."""


@dataclass(frozen=True)
class Folding:
    """What layers that are folded into one loop body need from the device that runs them."""

    loop: Loop
    constrain: Constrain = unconstrained
    axes: Callable[[str, tuple[int, ...]], Axes] = replicated
    """Maps the name and shape of a parameter to the mesh axes that each dimension is sharded over."""
    host: HostMemory = HostMemory()
    row_shards: int = 1
    """Number of parts that the rows of a batch are split into inside one program."""
    in_place: InPlace | None = None
    """None where a program cannot write into a part of a tensor."""
