"""Rows of packed documents in chunks, and sums of logarithms of decays within them, for layers with a state.

Legend: B rows, N heads, T tokens, K chunks, L tokens of a chunk."""

import torch.nn.functional as F
from torch import Tensor

GRID = 2.0**-9
"""Sums of logarithms of decays are split at it, since they grow to thousands while their differences matter near 0:
multiples of it are exact in float32 to 2^15, the most that 2,048 tokens of xLSTM reach under its soft cap of 15, and
the rest stays below 2."""
OUTSIDE = -1
"""Segment of what precedes a row, and of the padding that fills its first chunk."""


def in_chunks(tensor: Tensor, *, size: int, dim: int, fill: int = 0) -> Tensor:
    """Cut a dimension of T tokens in two, (K, L); the first chunk begins with padding where L does not divide T."""
    count = -(-tensor.shape[dim] // size)
    more = count * size - tensor.shape[dim]
    padding = (0, 0) * (tensor.ndim - 1 - dim) + (more, 0)
    return (F.pad(tensor, padding, value=fill) if more else tensor).unflatten(dim, (count, size))


def sums_of_logs(log_decay_BNT: Tensor, *, size: int) -> tuple[Tensor, Tensor]:
    """Return sums over the chunk's tokens so far, (B, N, K, L): of multiples of `GRID`, and of what rounding left."""
    coarse_BNT = (log_decay_BNT.detach() / GRID).round() * GRID
    parts = (coarse_BNT, log_decay_BNT - coarse_BNT)
    coarse_BNKL, fine_BNKL = (in_chunks(part, size=size, dim=2).cumsum(-1) for part in parts)
    return coarse_BNKL, fine_BNKL
