"""Where an intermediate value of a program lies, said to the compiler that splits the program (spmd)."""

from typing import Protocol

from torch import Tensor


class Lay(Protocol):
    """Says where a value lies; the value stays the same, and without spmd nothing is said."""

    def __call__(self, tensor: Tensor, *, rows_dim: int | None) -> Tensor:
        """`tensor`, split along `rows_dim` over the devices, or whole on each of them (None)."""


def as_it_lies(tensor: Tensor, *, rows_dim: int | None) -> Tensor:
    """Nothing is said."""
    return tensor
