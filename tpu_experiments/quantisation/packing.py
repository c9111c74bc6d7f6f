"""Integers of a few bits, packed without gaps into bytes or into compressed-tensors' words of 32 bits."""

import numpy as np
import torch
from torch import Tensor

CHUNK = 2**22
"""Integers that are packed at once; a multiple of 8, so that chunks end at whole bytes."""


def packed_bytes(values: Tensor, *, bits: int) -> Tensor:
    """Return non-negative integers in `bits` bits each, lowest bit first, as bytes (ceil(n bits / 8),)."""
    parts = []
    for some in values.flatten().split(CHUNK):
        planes = some.numpy().astype(np.uint32)[:, None] >> np.arange(bits, dtype=np.uint32) & 1
        parts.append(np.packbits(planes.astype(np.uint8), bitorder="little"))
    return torch.from_numpy(np.concatenate(parts))


def unpacked_bytes(packed: Tensor, *, bits: int, shape: tuple[int, ...]) -> Tensor:
    """Return the integers of `packed_bytes` in a shape, int32."""
    count = int(np.prod(shape))
    planes = np.unpackbits(packed.numpy(), count=count * bits, bitorder="little").reshape(count, bits)
    values = np.zeros(count, dtype=np.int32)
    for bit in range(bits):
        values |= planes[:, bit].astype(np.int32) << bit
    return torch.from_numpy(values).reshape(shape)


def packed_words(codes_NK: Tensor, *, bits: int) -> Tensor:
    """Return signed codes in int32 words (N, ceil(K / p)), p = 32 // bits of them in each, the first one lowest.

    Codes are stored plus 2^(bits - 1), as compressed-tensors' `pack_to_int32` does.
    """
    rows, columns = codes_NK.shape
    per_word = 32 // bits
    unsigned = codes_NK.to(torch.int32) + 2 ** (bits - 1)
    padded = torch.nn.functional.pad(unsigned, (0, -columns % per_word)).reshape(rows, -1, per_word)
    words = torch.zeros(padded.shape[:2], dtype=torch.int32)
    for place in range(per_word):
        words |= padded[..., place] << (bits * place)
    return words


def unpacked_words(words_NW: Tensor, *, bits: int, columns: int) -> Tensor:
    """Return the signed codes (N, columns) of `packed_words`, int32."""
    places = torch.arange(32 // bits, dtype=torch.int32) * bits
    codes_NWP = (words_NW[..., None] >> places & (2**bits - 1)) - 2 ** (bits - 1)
    return codes_NWP.flatten(1)[:, :columns]
