"""Block-wise 8-bit codes for optimizer state (arXiv 2110.02861), in plain torch for XLA, CPU and CUDA.

A block is 256 neighbouring elements of one parameter in row-major order, the last one may be shorter; it has one
float32 absmax, and each element a byte that selects one of 256 values in [-1, 1] of the dynamic data type
(arXiv 1511.04561). Blocks and, but for `LEAST`, values are bitsandbytes'. In a stack over layers each layer has its own
blocks, so that folded and unrolled layers have equal numbers, and a checkpoint's tensors are those of single layers.

A block is defined over the whole parameter, not over a device's share of it, so that numbers do not depend on the
sharding and a checkpoint resumes on another mesh. Codes have the parameter's shape and are sharded as it is; XLA
exchanges elements between devices only where a share does not hold whole blocks.
"""

import functools
import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tpu_experiments.config.schema import BLOCK
from tpu_experiments.runtime.dynamic_type import DECADES, SIGNED, UNSIGNED, XLA_DEVICES, num_values
from tpu_experiments.runtime.sharding import ABSMAX

ZERO = 127
"""Code of 0 in the signed data type; those of negative values are below it."""
LEAST = 1e-7
"""Value of code 0 without a sign, in place of 0 and below the next, 3.25e-7 (adamw8bit.py has the reason)."""
TINY = torch.finfo(torch.float32).tiny


def absmax_shape(shape: tuple[int, ...], *, is_stack: bool) -> tuple[int, ...]:
    """Return the shape of the blocks' absmax.

    Rows of whole blocks keep their dimensions, so that sharding splits blocks as it splits elements.
    """
    layers, own = shape[:is_stack], shape[is_stack:]
    if own[-1] % BLOCK == 0:
        return (*shape[:-1], own[-1] // BLOCK)
    return (*layers, math.ceil(math.prod(own) / BLOCK))


def encoded(values: Tensor, *, signed: bool, is_stack: bool) -> tuple[Tensor, Tensor]:
    """Return codes in the shape of the float32 values, and the absmax of every block."""
    shape = tuple(values.shape)
    blocks = _blocks(values, absmax_shape(shape, is_stack=is_stack))
    absmax = blocks.abs().amax(-1)
    # Not 1e-38: a TPU flushes what is smaller than the smallest normal number to 0.
    scaled = blocks * (1.0 / absmax.clamp(min=TINY))[..., None]
    return _elements(_nearest(scaled, signed=signed), shape), absmax


def decoded(codes: Tensor, absmax: Tensor, *, signed: bool) -> Tensor:
    """Return the float32 values that codes and absmax stand for."""
    values = _values_at(codes, signed=signed)
    blocks = _blocks(values if signed else values.clamp(min=LEAST), tuple(absmax.shape))
    return _elements(blocks * absmax[..., None], tuple(codes.shape))


def decoded_slot(slots: Mapping[str, Tensor], name: str, *, signed: bool) -> Tensor:
    """Return the float32 values of a slot, which has codes or is float32 itself."""
    absmax = slots.get(name + ABSMAX)
    return slots[name] if absmax is None else decoded(slots[name], absmax, signed=signed)


def _blocks(elements: Tensor, absmax: tuple[int, ...]) -> Tensor:
    """Return elements as blocks, (*absmax, BLOCK); the last block of rows without whole blocks is padded."""
    if math.prod(absmax) * BLOCK == elements.numel():
        return elements.reshape(*absmax, BLOCK)
    flat = elements.flatten(len(absmax) - 1)
    return F.pad(flat, (0, absmax[-1] * BLOCK - flat.shape[-1])).reshape(*absmax, BLOCK)


def _elements(blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return blocks as elements of the shape, without padding."""
    if blocks.numel() == math.prod(shape):
        return blocks.reshape(shape)
    flat = blocks.flatten(-2)
    return flat[..., : math.prod(shape[flat.ndim - 1 :])].reshape(shape)


# ---- the data type ------------------------------------------------------------------------------------------

# In XLA's programs codes are computed, by ramps (clamped linear functions): a TPU has no fast gather, torch_xla sends
# `bucketize` to the host, and a comparison with a Python number becomes one in float64. A decade's values are the
# centres of equal intervals, and each value's code is the number of midpoints between values below it.


def _values_at(codes: Tensor, *, signed: bool) -> Tensor:
    """Return the float32 values of codes."""
    if codes.device.type not in XLA_DEVICES:
        return _table(codes.device, signed=signed)[codes.int()]
    numbers = codes.to(torch.float32)
    if not signed:
        return _magnitude(numbers, signed=False)
    centred = numbers - ZERO
    return centred.sign() * _magnitude(centred.abs(), signed=True)


def _nearest(scaled: Tensor, *, signed: bool) -> Tensor:
    """Return the codes, uint8, of the values nearest to `scaled`, in [-1, 1]."""
    if scaled.device.type not in XLA_DEVICES:
        table = _table(scaled.device, signed=signed)
        return torch.bucketize(scaled, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)
    if not signed:
        return _rank(scaled, signed=False).to(torch.uint8)
    # There is no -1: the largest negative value has rank 127, and 1 has 128.
    return ((scaled.sign() * _rank(scaled.abs(), signed=True)).clamp(min=-ZERO) + ZERO).to(torch.uint8)


@functools.cache
def _table(device: torch.device, *, signed: bool) -> Tensor:
    return torch.tensor(SIGNED if signed else UNSIGNED, device=device)


def _magnitude(rank: Tensor, *, signed: bool) -> Tensor:
    """Return the value, in [0, 1], that `rank` of the values from 0 upwards are below."""
    found, first = rank.clamp(max=1.0) * 1e-7, 1
    for decade in DECADES:
        count = num_values(decade, signed=signed)
        found = found + (rank - (first - 0.5)).clamp(0.0, count) * (0.9 * 10.0 ** (decade - 6) / count)
        first += count
    return found


def _rank(magnitude: Tensor, *, signed: bool) -> Tensor:
    """Return how many of the values from 0 upwards are below the value nearest to a magnitude, in [0, 1]."""
    found = torch.zeros_like(magnitude)
    for decade in DECADES:
        count = num_values(decade, signed=signed)
        # In intervals of the decade; its values are at 0.5, 1.5, ..., and midpoints between them at 1, 2, ...
        place = magnitude * (count / 0.9 * 10.0 ** (6 - decade)) - count / 9
        # The midpoint to the last value of the decade below is at 0.2, or to 0 in the first decade.
        lowest = 0.2 if decade else 0.25 - count / 18
        found = found + torch.minimum(place * (1 / lowest), place + 1.0).clamp(0.0, count)
    # The midpoint to 1 is a quarter of an interval below it.
    return (found + (place * 4 - (4 * count - 2)).clamp(0.0, 1.0)).floor()
