"""Places of a row for masked tokens, or for texts: static, so that the program of every step is the same."""

import math

SPARE = 6.0
"""Standard deviations of a row's number of masked tokens above its mean for which there are places. A row that draws
more, once in 10^9, masks the first ones."""
LANES = 8
"""The number of places of a row is a multiple of this, the rows of a tile of a TPU's registers."""


def num_places(length: int, *, rate: float) -> int:
    """Return the places of a row for masked tokens, enough for `SPARE` standard deviations above their mean."""
    needed = rate * length + SPARE * math.sqrt(length * rate * (1 - rate))
    return min(length, math.ceil(needed / LANES) * LANES)


FEWEST_TOKENS = 2
"""Tokens of the shortest text with its label."""


def num_texts(length: int) -> int:
    """Return the places of a row for texts: as many as could be in it."""
    return max(1, length // FEWEST_TOKENS)
