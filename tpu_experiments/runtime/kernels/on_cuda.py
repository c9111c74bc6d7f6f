"""bitsandbytes' kernels for NF4 on a GPU: the product that decodes as it multiplies, and the decoding alone.

They take the codes and scales of `quantised.py` as they lie. The same operators have plain code for a CPU, with
which the tests compare; the CUDA kernels are compared in `pytest -m cuda`, on a machine with a GPU.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from tpu_experiments.runtime.dynamic_type import SIGNED


@cache
def has_bitsandbytes() -> bool:
    """Return whether the package is installed (extra `gpu`)."""
    return find_spec("bitsandbytes") is not None


def nf4_product(x: Tensor, codes: Tensor, scales: Sequence[Tensor], *, block: int) -> Tensor:
    """Multiply (..., K) by an NF4 weight (N, K).

    Args:
        codes: two to a byte, (N, K / 2); K divides by `block`.
        scales: one float32 per block; or one byte per block, a float32 per 256 of these, and their offset (1,).
        block: weights that share a scale.
    """
    shape = [len(codes), 2 * codes.shape[1]]
    if len(scales) == 1:
        product: Tensor = _operators().gemm_4bit(x, codes.view(-1, 1), shape, scales[0].flatten(), block, "nf4")
        return product
    absmax, nested, offset = scales
    nesting = (absmax.flatten(), _table(x.device), offset.view(()))
    product = _operators().gemm_4bit(x, codes.view(-1, 1), shape, nested, block, "nf4", None, *nesting)
    return product


def nf4_weight(codes: Tensor, scales: Sequence[Tensor], *, block: int, dtype: torch.dtype) -> Tensor:
    """Return the decoded weight (N, K); arguments as for `nf4_product`."""
    absmax = scales[0].flatten()
    if len(scales) > 1:
        _, nested, offset = scales
        absmax = _operators().dequantize_blockwise(absmax, nested, _table(codes.device), 256, torch.float32) + offset
    shape = [len(codes), 2 * codes.shape[1]]
    decoded: Tensor = _operators().dequantize_4bit(codes.view(-1, 1), absmax, block, "nf4", shape, dtype)
    return decoded


@cache
def _operators() -> Any:
    import bitsandbytes  # noqa: F401  registers its operators; takes 2 s and CUDA's libraries

    return torch.ops.bitsandbytes


@cache
def _table(device: torch.device) -> Tensor:
    """Return the values of the 8-bit codes of scales, made once: a copy to the GPU waits for it."""
    return torch.tensor(SIGNED, device=device)
