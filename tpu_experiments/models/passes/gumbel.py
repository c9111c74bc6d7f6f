"""Draws from a categorical distribution as a function of a word: no generator state, the same on any devices.

The index of the largest logit plus Gumbel noise is distributed as the softmax (Gumbel, 1954; arXiv 1611.01144).
"""

import torch
from torch import Tensor

from tpu_experiments.models.parts.dropout import hashed
from tpu_experiments.models.passes.loss import numbers

SITE = 0x47756D62
"""Sets the noise apart from the other uses of a row's word."""


def sampled(logits: Tensor, words: Tensor) -> Tensor:
    """Return indices (...,), int64, drawn from the softmax of the logits (..., V).

    Args:
        words: a random word for each draw, (...,) int32.
    """
    return (logits + gumbel(words, logits.shape[-1])).argmax(-1)


def gumbel(words: Tensor, num_values: int) -> Tensor:
    """Return standard Gumbel noise (..., num_values), float32, a function of the words (...,) int32.

    It is -log(-log(1 - u)) of a uniform u in steps of 2**-31, so that large values, which decide, are the finest.
    """
    values_V = hashed(numbers(num_values, words.device) ^ _scalar(SITE, words))
    bits = hashed(words[..., None] ^ values_V) & _scalar(0x7FFFFFFF, words)
    uniform = ((bits.to(torch.float32) + 0.5) * 2.0**-31).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def _scalar(value: int, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.int32, device=like.device)
