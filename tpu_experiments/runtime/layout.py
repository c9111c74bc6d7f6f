"""Where an intermediate value of a program lies, said to the compiler that splits the program (spmd)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tpu_experiments.config.mesh import Axes
from tpu_experiments.config.sources import ROWS
from tpu_experiments.runtime.loop import Loop

BY_ROWS: Axes = (ROWS,)
"""Of a value whose first dimension is rows; devices along `tensor` hold the same rows."""
HEAD: Axes = ("tensor",)
"""Of the head (V, H) where it is used: the devices along `tensor` share the vocabulary."""


class Lay(Protocol):
    """Says where a value lies; the value stays the same, and without spmd nothing is said."""

    def __call__(self, tensor: Tensor, *, axes: Axes) -> Tensor:
        """`tensor`, of each dimension split over these axes of the mesh and whole along the others."""


def as_it_lies(tensor: Tensor, *, axes: Axes) -> Tensor:
    """Nothing is said."""
    return tensor


def nothing_split(name: str, shape: tuple[int, ...]) -> Axes:
    """Every device holds every parameter."""
    return ()


def in_use(axes: Axes) -> Axes:
    """Where a weight lies while its layer is computed: whole along all axes but `tensor` (ZeRO-3, arXiv 1910.02054)."""
    return tuple("tensor" if "tensor" in (axis or ()) else None for axis in axes)


def same(tensor: Tensor) -> Tensor:
    """Where it is."""
    return tensor


@dataclass(frozen=True)
class HostMemory:
    """The way of an intermediate value into the memory of the host and back; without one it stays on the device."""

    put: Callable[[Tensor], Tensor] = same
    take: Callable[[Tensor], Tensor] = same


@dataclass(frozen=True)
class Folding:
    """What layers that are folded into one need of the device that runs them."""

    loop: Loop
    lay: Lay = as_it_lies
    axes: Callable[[str, tuple[int, ...]], Axes] = nothing_split
    """Name and shape of a parameter to the mesh axes that each dimension is split over."""
    host: HostMemory = HostMemory()
