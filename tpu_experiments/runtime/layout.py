"""Sharding constraints on intermediate tensors (spmd), and what folded layers need from the runtime."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tpu_experiments.config.mesh import Axes
from tpu_experiments.config.sources import ROWS
from tpu_experiments.runtime.loop import Loop

BY_ROWS: Axes = (ROWS,)
"""Constraint of a value whose first dimension is rows: sharded by rows, replicated along `tensor`."""
HEAD: Axes = ("tensor",)
"""Constraint of the output head (V, H) during its computation: the vocabulary is sharded along `tensor`."""


class Lay(Protocol):
    """Sharding constraint on a value. Its numbers do not change; outside spmd it is the identity."""

    def __call__(self, tensor: Tensor, *, axes: Axes) -> Tensor:
        """Return `tensor` with each dimension sharded over its mesh axes and replicated along the others."""


def as_it_lies(tensor: Tensor, *, axes: Axes) -> Tensor:
    """Return `tensor` without a constraint."""
    return tensor


def nothing_split(name: str, shape: tuple[int, ...]) -> Axes:
    """Return no axes: the parameter is replicated."""
    return ()


def in_use(axes: Axes) -> Axes:
    """Return the axes of a weight while its layer is computed.

    It is gathered along every axis except `tensor` (ZeRO-3, arXiv 1910.02054).
    """
    return tuple("tensor" if "tensor" in (axis or ()) else None for axis in axes)


def same(tensor: Tensor) -> Tensor:
    """Return `tensor` unchanged."""
    return tensor


@dataclass(frozen=True)
class HostMemory:
    """Transfers of an intermediate value to host memory and back; by default it stays on the device."""

    put: Callable[[Tensor], Tensor] = same
    take: Callable[[Tensor], Tensor] = same


@dataclass(frozen=True)
class Folding:
    """What layers that are folded into one loop body need from the device that runs them."""

    loop: Loop
    lay: Lay = as_it_lies
    axes: Callable[[str, tuple[int, ...]], Axes] = nothing_split
    """Maps the name and shape of a parameter to the mesh axes that each dimension is sharded over."""
    host: HostMemory = HostMemory()
