"""Products of rows with one of several matrices, as operators of torch with static shapes: a mixture's routed experts.

Rows are sorted by expert, so that each expert's are one group; how many rows a group has is data, and no shape depends
on it. Every part of the rows, one for each chip that they are split over, is sorted by itself. Legend: S tokens, K
experts of a token, R = S K rows, E experts, P parts, A inputs of a matrix, N outputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tpu_experiments.config.mesh import Mesh
from tpu_experiments.runtime.kernels.attention import Target

MIN_ROWS = 128
"""Rows of a part are a multiple of this: the smallest tile of the kernel that fills the matrix unit."""


@dataclass(frozen=True)
class GroupedProducts:
    """How the devices of a run multiply groups."""

    mesh: Mesh
    """Chips that tokens are split over."""
    target: Target = "tpu"
    """`interpreted` runs the kernel's steps as plain XLA, for tests on a CPU."""

    def parts_of(self, num_tokens: int, *, of_token: int) -> int:
        """Return the number of parts that tokens with `of_token` experts each are sorted in; 0: they do not divide."""
        parts = self.mesh.num_shards
        return parts if num_tokens % parts == 0 and num_tokens // parts * of_token % MIN_ROWS == 0 else 0


_installed: GroupedProducts | None = None


def install_grouped_products(products: GroupedProducts | None) -> None:
    """Have experts use grouped products from now on; None where the device has none."""
    global _installed
    _installed = products


def grouped_products() -> GroupedProducts | None:
    """Return how the devices of this process multiply groups; None where they do not."""
    return _installed


@torch.library.custom_op("tpu_experiments::expert_order", mutates_args=(), device_types="cpu")
def expert_order(chosen: Tensor, experts: int, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the choices (S, K) of each part by expert, those of one expert in order.

    Returns:
        Numbers, within the part, of the choices in their new order (R,); the new place of each choice (R,); the number
        of choices of each expert (P, E). All int32.
    """
    flat = chosen.reshape(parts, -1)
    order = flat.argsort(dim=1, stable=True)
    sizes = torch.nn.functional.one_hot(flat.long(), experts).sum(1)
    return order.flatten().int(), order.argsort(dim=1).flatten().int(), sizes.int()


@expert_order.register_fake
def _(chosen: Tensor, experts: int, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    order, place = (chosen.new_empty(chosen.numel(), dtype=torch.int32) for _ in range(2))
    return order, place, chosen.new_empty((parts, experts), dtype=torch.int32)


@torch.library.custom_op("tpu_experiments::rows_at", mutates_args=(), device_types="cpu")
def rows_at(x: Tensor, index: Tensor, parts: int) -> Tensor:
    """Return rows (R, A) of x by their numbers (R,) within their part."""
    first = torch.arange(parts, device=x.device) * (len(x) // parts)
    return x[(index.view(parts, -1) + first[:, None]).flatten()]


@rows_at.register_fake
def _(x: Tensor, index: Tensor, parts: int) -> Tensor:
    return x.new_empty(len(index), *x.shape[1:])


@torch.library.custom_op("tpu_experiments::grouped_product", mutates_args=(), device_types="cpu")
def grouped_product(x: Tensor, weight: Tensor, sizes: Tensor, contracted: int) -> Tensor:
    """Multiply the rows (R, A) of each group by its matrix, to (R, N).

    Args:
        weight: (E, A, N), or (E, N, A).
        contracted: the dimension of `weight` that is A.
    """
    groups = x.split(sizes.flatten().tolist())
    matrices = [w if contracted == 1 else w.T for w in weight] * len(sizes)
    return torch.cat([rows @ matrix for rows, matrix in zip(groups, matrices, strict=True)])


@grouped_product.register_fake
def _(x: Tensor, weight: Tensor, sizes: Tensor, contracted: int) -> Tensor:
    return x.new_empty(len(x), weight.shape[3 - contracted])


@torch.library.custom_op("tpu_experiments::grouped_outer", mutates_args=(), device_types="cpu")
def grouped_outer(a: Tensor, b: Tensor, sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum the outer products of the rows (R, A) and (R, N) of each group, of all parts, to (E, A, N) of a data type."""
    lengths = sizes.flatten().tolist()
    pairs = zip(a.to(dtype).split(lengths), b.to(dtype).split(lengths), strict=True)
    return torch.stack([one.T @ other for one, other in pairs]).unflatten(0, tuple(sizes.shape)).sum(0)


@grouped_outer.register_fake
def _(a: Tensor, b: Tensor, sizes: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty(sizes.shape[1], a.shape[1], b.shape[1], dtype=dtype)
