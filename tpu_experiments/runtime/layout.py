"""Where an intermediate value of a program lies, said to the compiler that splits the program (spmd)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tpu_experiments.runtime.loop import Loop


class Lay(Protocol):
    """Says where a value lies; the value stays the same, and without spmd nothing is said."""

    def __call__(self, tensor: Tensor, *, split_dim: int | None) -> Tensor:
        """`tensor`, split along `split_dim` over the devices, or whole on each of them (None)."""


def as_it_lies(tensor: Tensor, *, split_dim: int | None) -> Tensor:
    """Nothing is said."""
    return tensor


def nothing_split(name: str, shape: tuple[int, ...]) -> int | None:
    """Every device holds every parameter."""
    return None


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
    split_dim: Callable[[str, tuple[int, ...]], int | None] = nothing_split
    """Name and shape of a parameter to the dimension along which the devices split it, None where each holds it."""
    host: HostMemory = HostMemory()
