"""Draws from categorical distributions by the inverse of their distribution function, in two levels.

One uniform number decides a draw: in which block of values it falls, and where in the block. Only the sums of blocks
and the values of one block are summed up, and nothing is sorted: for 64 rows of 151,936 logits on v5e 0.6 ms a draw,
Gumbel noise 6.3 ms (planned). Legend: B rows, V values, N blocks, C values of a block."""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 512
"""C; sums of V / C blocks and of C values take about as long."""


def drawn(logits_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return indices (B,) int32 drawn from the softmax of float32 logits by uniform numbers in [0, 1).

    Of values in ascending order it is the first whose distribution function exceeds the number; a value of probability
    0 is never drawn.
    """
    num = logits_BV.shape[1]
    weights_BV = torch.exp(logits_BV - logits_BV.amax(-1, keepdim=True))
    weights_BNC = F.pad(weights_BV, (0, -num % BLOCK)).unflatten(1, (-1, BLOCK))
    sums_BN = weights_BNC.sum(-1)
    reached_BN = sums_BN.cumsum(-1)
    goal_B1 = uniform_B[:, None] * reached_BN[:, -1:]
    block_B1 = torch.minimum((reached_BN <= goal_B1).sum(-1, keepdim=True, dtype=torch.int32), _last(sums_BN > 0))
    at_BN = torch.arange(sums_BN.shape[1], device=sums_BN.device, dtype=torch.int32) == block_B1
    # Sums over a mask, as a gather of single rows is slow on TPUs. All terms but one are 0.
    before_B1 = torch.where(at_BN, reached_BN - sums_BN, 0.0).sum(-1, keepdim=True)
    own_BC = torch.where(at_BN[..., None], weights_BNC, 0.0).sum(1)
    inside_BC = before_B1 + own_BC.cumsum(-1)
    place_B1 = torch.minimum((inside_BC <= goal_B1).sum(-1, keepdim=True, dtype=torch.int32), _last(own_BC > 0))
    return (block_B1 * BLOCK + place_B1)[:, 0]


def _last(is_possible: Tensor) -> Tensor:
    """Return the last index of every row (B, 1) that is possible, int32."""
    index = torch.arange(is_possible.shape[1], device=is_possible.device, dtype=torch.int32)
    return torch.where(is_possible, index, 0).amax(-1, keepdim=True)
