"""Sums of products over several dimensions, as one operation.

torch takes tensordot and einsum apart into views and a product of matrices. A view of features as heads is a copy on a
TPU where a head does not fill the 128 lanes; a product whose results are heads needs none, since XLA chooses the order
in which it writes them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.library.custom_op("tpu_experiments::contraction", mutates_args=())
def contraction(a: Tensor, b: Tensor, of_a: Sequence[int], of_b: Sequence[int], in_parts: bool = False) -> Tensor:
    """Sum the products of `a` and `b` over dimensions `of_a` of one and `of_b` of the other.

    The result has the other dimensions of `a`, then those of `b`. All dimensions are counted from 0.

    Args:
        in_parts: whether the first dimension of both is one of parts: each part has a sum of its own, and the result
            begins with that dimension.
    """
    if in_parts:
        dims = [[dim - 1 for dim in of] for of in (of_a, of_b)]
        return torch.stack([torch.tensordot(*pair, dims) for pair in zip(a, b, strict=True)])
    return torch.tensordot(a, b, (list(of_a), list(of_b))).contiguous()


@contraction.register_fake
def _(a: Tensor, b: Tensor, of_a: Sequence[int], of_b: Sequence[int], in_parts: bool = False) -> Tensor:
    return a.new_empty(shape_of(a.shape, b.shape, of_a, of_b, in_parts))


CONTRACTION = torch.ops.tpu_experiments.contraction.default


def shape_of(
    a: Sequence[int], b: Sequence[int], of_a: Sequence[int], of_b: Sequence[int], in_parts: bool = False
) -> tuple[int, ...]:
    """Return the shape of the contraction of tensors of these shapes."""
    left = [size for dim, size in enumerate(a) if dim not in of_a]
    return *left, *(size for dim, size in enumerate(b) if dim not in of_b and not (in_parts and dim == 0))
