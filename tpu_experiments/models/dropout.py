"""Dropout masks that are a function of where a number is: drawn by nobody, stored nowhere, the same on any devices.

Every row of a batch comes with a random word (training/inputs.py: of seed, stage, step and the row's number in the
global batch). A mask's bit is a hash of it, the layer, the projection, the token's place in its row and the feature.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

NOISE = "noise"
"""Name of the rows' random words in a batch, (..., rows) int32."""
GOLDEN = 0x9E3779B1 - 2**32
"""Odd; 2**32 over the golden ratio: multiples of it lie far apart (Knuth, volume 3, section 6.4)."""


@dataclass(frozen=True)
class Noise:
    """What masks are made of while a forward pass, or a layer of it, is computed."""

    words_R: Tensor
    """int32, one for each row."""
    layer: Tensor | None = None
    """Number of the layer, int32 (), inside of a loop over layers; else None, and modules know theirs."""


_noise: ContextVar[Noise | None] = ContextVar("noise", default=None)


def current_noise() -> Noise | None:
    """The noise of the forward pass that is being computed."""
    return _noise.get()


@contextmanager
def noise(words_R: Tensor | None, *, layer: Tensor | None = None) -> Iterator[None]:
    """While it lasts, dropout makes its masks of these words; None leaves what there is."""
    token = None if words_R is None else _noise.set(Noise(words_R, layer))
    try:
        yield
    finally:
        if token is not None:
            _noise.reset(token)


def random_mask(x: Tensor, words_R: Tensor, *, layer: Tensor | int, site: int, keep: float) -> Tensor:
    """True with probability `keep`, of the shape of x (..., features), whose tokens are those of R rows in order.

    A token's mask is one of 2**32 patterns that its site (int32) has; which one is a hash of the row's word, the layer,
    the site and the token's place in the row. XLA computes a bit inside of what reads `x`, of a word for every token
    and one for every feature: two multiplications a number. Patterns that are the same for all layers and steps are no
    worse: over 2**20 tokens, pairs of 512 features were correlated as independent bits are (0.1 %), and no pair stood
    out; words for the features of every row took 1.8 ms more of a step of 266 (Qwen2.5 0.5B on v5e-8, planned).

    Raises:
        ValueError: the tokens of x are not R rows.
    """
    num_rows, num_tokens, num_features = len(words_R), x.shape[:-1].numel(), x.shape[-1]
    if num_tokens % num_rows:
        raise ValueError(f"dropout of {tuple(x.shape)}: {num_tokens} tokens are not those of {num_rows} rows")
    number = layer if isinstance(layer, Tensor) else _scalar(layer, x)
    own_R = _hashed(words_R ^ (number * GOLDEN + site))
    tokens_RT = _hashed(own_R[:, None] ^ (_range(num_tokens // num_rows, x) * GOLDEN))
    features = _hashed(_range(num_features, x) ^ site)
    bits_RTF = _mixed(tokens_RT[..., None] ^ features) >= round((1 - keep) * 2**32) - 2**31
    return bits_RTF.reshape(x.shape)


def _mixed(word: Tensor) -> Tensor:
    """int32 to int32: multiplications and shift of lowbias32 (C. Wellons, hash prospector, 2018).

    The arithmetic shift gives one result to two words that are each other's complement after the first product. Neither
    that nor leaving out the two other shifts changed a correlation of features, of pairs or threes, over 65,536 tokens.
    """
    word = word * 0x7FEB352D
    return (word ^ _shifted(word, 15)) * (0x846CA68B - 2**32)


def _hashed(word: Tensor) -> Tensor:
    """int32 to int32, one to one: lowbias32."""
    for distance, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        word = (word ^ _shifted(word, distance) & (2 ** (32 - distance) - 1)) * factor
    return word ^ _shifted(word, 16) & 0xFFFF


def _shifted(word: Tensor, distance: int) -> Tensor:
    """`word >> distance`, which torch_xla makes a division of, that rounds negative words to zero."""
    return torch.bitwise_right_shift(word, _scalar(distance, word))


def _scalar(value: int, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.int32, device=like.device)


def _range(length: int, like: Tensor) -> Tensor:
    return torch.arange(length, dtype=torch.int32, device=like.device)
