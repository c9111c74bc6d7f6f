"""Dropout masks as a function of position: no generator state, no storage, the same on any devices.

Every row of a batch carries a random word (training/batches.py derives it from seed, stage, step and the row's number
in the global batch). A bit of a mask is a hash of that word, the layer, the module, the token's position in its row and
the feature. Adapters draw so (adapters/linear.py), and so do a model's own dropout modules once `drop_by_rows` replaced
them.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

NOISE = "noise"
"""Key of the rows' random words in a batch, (..., rows) int32."""
THRESHOLDS = "dropout_thresholds"
"""Key of the rows' own dropout thresholds in a batch (`threshold_of`), (..., rows) int32; of packed adapters alone."""
GOLDEN = 0x9E3779B1 - 2**32
"""2**32 divided by the golden ratio, odd, as int32: its multiples are far apart (Knuth, volume 3, section 6.4)."""


@dataclass(frozen=True)
class Noise:
    """Inputs of dropout masks during a forward pass, or during one layer of it."""

    words_R: Tensor
    """Random words, one int32 per row; where rows have a threshold of their own, (R, 2): word and threshold."""
    layer: Tensor | None = None
    """Number of the layer, int32 (), inside a loop over layers; otherwise None, and modules use their own number."""

    def layer_of(self, own: int) -> Tensor | int:
        """Return the number of the layer of a module that has `own` outside a loop."""
        return own if self.layer is None else self.layer


_noise: ContextVar[Noise | None] = ContextVar("noise", default=None)


def current_noise() -> Noise | None:
    """Return the noise of the current forward pass; None where there is none."""
    return _noise.get()


def noise_in_use(owner: str, *, off: str) -> Noise:
    """Return the noise of the current forward pass, for a module that cannot do without.

    Raises:
        RuntimeError: there is none.
    """
    found = _noise.get()
    if found is None:
        raise RuntimeError(
            f"{owner}; the rows handed to the model lack {NOISE!r}, which the batch of a training step has; hand it "
            f"on, or set {off}."
        )
    return found


@contextmanager
def noise(words_R: Tensor | None, *, layer: Tensor | None = None) -> Iterator[None]:
    """Derive dropout masks from these words inside the block; None keeps the current noise."""
    token = None if words_R is None else _noise.set(Noise(words_R, layer))
    try:
        yield
    finally:
        if token is not None:
            _noise.reset(token)


@contextmanager
def other_noise(number: int) -> Iterator[None]:
    """Derive other masks inside the block for a module that runs more than once; those of number 0 are its own."""
    found = _noise.get()
    if found is None or number == 0:
        yield
    else:
        with noise(found.words_R + number * GOLDEN, layer=found.layer):
            yield


def random_words(num: int, *, key: int | NDArray[np.uint64], counter: int = 0) -> NDArray[np.int32]:
    """Return random words (num,) by Philox, a function of the key and the counter that it begins at."""
    drawn = np.random.Philox(key=key, counter=counter).random_raw(num) >> np.uint64(32)
    return drawn.astype(np.uint32).view(np.int32)


def noise_of(rows: Mapping[str, Tensor]) -> Tensor | None:
    """Return what `noise` takes for the rows of a batch; None where they have no random words."""
    if NOISE in rows and THRESHOLDS in rows:
        return torch.stack([rows[NOISE], rows[THRESHOLDS]], dim=-1)
    return rows.get(NOISE)


def threshold_of(keep: float) -> int:
    """Return the int32 that a random word reaches with probability `keep`."""
    return round((1 - keep) * 2**32) - 2**31


def dropped(x: Tensor, words: Tensor, *, layer: Tensor | int, site: int, keep: float, feature_dims: int = 1) -> Tensor:
    """Apply dropout to x (..., features): each value is kept with probability `keep`, and divided by it, or is 0.

    Args:
        words: those of a `Noise`; with thresholds, each row has its own probability in the place of `keep`.
        feature_dims: dimensions that the features are viewed as, the last of x; the mask is the same.
    """
    if words.ndim == 1:
        of_x = random_mask(x, words, layer=layer, site=site, keep=keep, feature_dims=feature_dims)
        return _kept(of_x, x / keep)
    assert feature_dims == 1, "packed adapters multiply features, not heads"
    words_R, thresholds_R = words.unbind(-1)
    mask = _random_mask(x, words_R, layer=layer, site=site, threshold=thresholds_R[:, None, None])
    keep_R = (0.5 - thresholds_R.to(torch.float32) * 2.0**-32).to(x.dtype)
    rows = x.reshape(len(words_R), -1, x.shape[-1])
    return _kept(mask, (rows / keep_R[:, None, None]).reshape(x.shape))


def _kept(mask: Tensor, x: Tensor) -> Tensor:
    """Return x where the mask is true, and 0.

    The 0 is a tensor: AOTAutograd on the meta device, on which TorchTPU's programs are traced, gives `where` with a
    number no gradient (torch 2.9.0 and 2.14.1).
    """
    return torch.where(mask, x, torch.scalar_tensor(0.0, dtype=x.dtype, device=x.device))


class RowDropout(nn.Dropout):
    """A model's own dropout, with masks that follow from the rows' random words instead of torch's generator.

    A tensor of two dimensions, as DeBERTa's embeddings of distances (2K, H) and a classifier's pooled texts (M, H), has
    a mask that follows from the word of the batch's first row on this device.
    """

    def __init__(self, p: float, *, name: str) -> None:
        """Set the probability of a 0; `name` is the module's path in the model, on which masks depend."""
        super().__init__(p)
        self.layer_idx, self.site = layer_and_hash(name)

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to (R, ..., features), or to a tensor that does not begin with the rows.

        Raises:
            RuntimeError: the batch of this forward pass has no random words.
        """
        if not self.training:
            return x
        given = noise_in_use(f"{type(self).__name__} of the model's own dropout={self.p:g}", off="that to 0")
        words_R = given.words_R if given.words_R.ndim == 1 else given.words_R[:, 0]
        is_of_rows = x.ndim > 2 and x.shape[0] % len(words_R) == 0
        own = words_R if is_of_rows else words_R[:1]
        layer, x_of_rows = given.layer_of(self.layer_idx), x if is_of_rows else x[None]
        return dropped(x_of_rows, own, layer=layer, site=self.site, keep=1 - self.p).view_as(x)


def drop_by_rows(module: nn.Module) -> None:
    """Replace the dropout modules of a model, in place, by those whose masks follow from the rows."""
    for name, part in list(module.named_modules()):
        if type(part) is nn.Dropout and part.p > 0:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, RowDropout(part.p, name=name))


def drops_by_rows(module: nn.Module) -> bool:
    """Return whether a model has dropout of its own that needs the rows' random words."""
    return any(isinstance(part, RowDropout) for part in module.modules())


def layer_and_hash(name: str) -> tuple[int, int]:
    """Return a module's layer number, 0 outside all layers, and an int32 hash of its name within a layer."""
    parts = name.split(".")
    place = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    number = 0 if place is None else int(parts[place])
    if place is not None:
        parts[place] = "*"
    digest = hashlib.blake2b(".".join(parts).encode(), digest_size=4).digest()
    return number, int.from_bytes(digest, "little") - 2**31


def random_mask(
    x: Tensor, words_R: Tensor, *, layer: Tensor | int, site: int, keep: float, feature_dims: int = 1
) -> Tensor:
    """Return a mask in the shape of x (..., features), true with probability `keep`.

    The first dimension of x holds R rows in order, each with as many tokens, or attention heads. Each site (int32, one
    for each projection) has 2**32 patterns for a token; a hash of the row's word, the layer, the site and the token's
    position in the row selects one: an odd factor a and a term b. A bit compares a f + b, modulo 2**32, where f is a
    random word of the feature (multiply-add hashing: two features are independent over a and b; M. Dietzfelbinger,
    STACS 1996). XLA fuses this into the operation that reads `x`: one multiplication per element. With two and a shift
    a step of 200 ms took 2.5 ms more, with separate words for the features of every row 1.8 ms more (Qwen2.5 0.5B on
    v5e-8, planned). Over 2**19 tokens, pairs of 1,024 features and triples of 96 were correlated as independent bits
    are (0.2 %) without an outlier, and a token's number of dropped features varied as theirs does (0.3 %).

    Raises:
        ValueError: the first dimension of x is no multiple of R.
    """
    threshold = threshold_of(keep)
    return _random_mask(x, words_R, layer=layer, site=site, threshold=threshold, feature_dims=feature_dims)


def _random_mask(
    x: Tensor, words_R: Tensor, *, layer: Tensor | int, site: int, threshold: Tensor | int, feature_dims: int = 1
) -> Tensor:
    """Return `random_mask` for a threshold (`threshold_of`), or one for each row, (R, 1, 1)."""
    shape = x.shape[-feature_dims:]
    num_rows, (first, *middle) = len(words_R), x.shape[:-feature_dims]
    if first % num_rows:
        raise ValueError(f"dropout of {tuple(x.shape)}: {first} tokens are not those of {num_rows} rows")
    number = layer if isinstance(layer, Tensor) else _scalar(layer, x)
    words = hashed(words_R ^ (number * GOLDEN + site))
    for size in middle if middle and first == num_rows else (first // num_rows, *middle):
        words = hashed(words[..., None] ^ (_range(size, x) * GOLDEN))
    features = hashed(_range(math.prod(shape), x) ^ site).view(shape)
    words = words.reshape(num_rows, -1, *(1 for _ in shape))
    bits = (words | 1) * features + hashed(words ^ GOLDEN) >= threshold
    return bits.reshape(x.shape)


def token_words(words_R: Tensor, *, length: int, site: int) -> Tensor:
    """Return a random int32 for every token of the rows, (R, T), a function of the row's word, its place and `site`.

    The layer of these words is -1, which no dropout has.
    """
    return place_words(words_R, _range(length, words_R), site=site)


def place_words(words_R: Tensor, places: Tensor, *, site: int) -> Tensor:
    """Return the random int32 of `token_words` for given places, (T,) or (R, T) int32."""
    own_R = hashed(words_R ^ (site - GOLDEN))
    return hashed(own_R[:, None] ^ (places * GOLDEN))


def uniform(words: Tensor) -> Tensor:
    """Return int32 words as float32 in [0, 1), in their order."""
    return (words.to(torch.float32) * 2.0**-32 + 0.5).clamp(min=0.0, max=1 - 2.0**-24)


def hashed(word: Tensor) -> Tensor:
    """Hash int32 to int32 by lowbias32, a bijection."""
    for distance, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        word = (word ^ _shifted(word, distance) & (2 ** (32 - distance) - 1)) * factor
    return word ^ _shifted(word, 16) & 0xFFFF


def _shifted(word: Tensor, distance: int) -> Tensor:
    """Shift right arithmetically; torch_xla lowers `>>` to a division, which rounds towards zero."""
    return torch.bitwise_right_shift(word, _scalar(distance, word))


def _scalar(value: int, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.int32, device=like.device)


def _range(length: int, like: Tensor) -> Tensor:
    return torch.arange(length, dtype=torch.int32, device=like.device)
