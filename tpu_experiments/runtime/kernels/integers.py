"""Products of int8 matrices with int32 sums, as one operation that every device has in its own way."""

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 32
"""cuBLASLt multiplies int8 matrices of more than 16 rows only, and of a number that 8 divides (seen: not of 33)."""


@torch.library.custom_op("tpu_experiments::int8_product", mutates_args=())
def int8_product(x_TK: Tensor, weight: Tensor, contracted: int) -> Tensor:
    """Return x (T, K) times an int8 matrix, summed over its dimension `contracted`, as int32.

    The matrix is (N, K) where `contracted` is 1, and (K, N) where it is 0.
    """
    matrix = weight.T if contracted == 1 else weight
    missing = -len(x_TK) % ROWS if x_TK.is_cuda else 0
    if missing:
        return torch._int_mm(F.pad(x_TK, (0, 0, 0, missing)), matrix)[: len(x_TK)]
    return torch._int_mm(x_TK, matrix)


@int8_product.register_fake
def _(x_TK: Tensor, weight: Tensor, contracted: int) -> Tensor:
    return x_TK.new_empty(len(x_TK), weight.shape[1 - contracted], dtype=torch.int32)
