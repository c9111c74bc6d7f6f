"""Places of a row for masked tokens, or for texts: static, so that the program of every step is the same."""

import math

LABEL = "label"
"""Array of rows with the labels' numbers, each at the last place of its text (data/steps/labels.py)."""
SPARE = 6.0
"""Standard deviations of a row's number of masked tokens above its mean for which there are places. A row that draws
more, once in 10^9, masks the first ones."""
LANES = 8
"""The number of places of a row is a multiple of this, the rows of a tile of a TPU's registers."""


PIECES = 4
"""Sum of squares over sum of the words' numbers of tokens up to which `SPARE` holds for whole words, whose standard
deviation is its square root times that of single tokens."""
MOST_PIECES = 16
"""Tokens of a word that are masked together. A longer one is cut, so that text without blanks is not masked all or not
at all; rows of such words alone have places for 3 standard deviations."""


def num_places(length: int, *, rate: float, whole_word: bool = False) -> int:
    """Return the places of a row for masked tokens, enough for `SPARE` standard deviations above their mean."""
    pieces = PIECES if whole_word else 1
    needed = rate * length + SPARE * math.sqrt(pieces * length * rate * (1 - rate))
    return min(length, math.ceil(needed / LANES) * LANES)


FEWEST_TOKENS = 2
"""Tokens of the shortest text with its label."""


def num_texts(length: int) -> int:
    """Return the places of a row for texts: as many as could be in it."""
    return max(1, length // FEWEST_TOKENS)


SHORTEST_PAIR = 4
"""Tokens of the shortest pair: two answers of one token, each behind a prompt of one."""


def num_pairs(length: int) -> int:
    """Return the places of a row for pairs: as many as could be in it."""
    return max(1, length // SHORTEST_PAIR)


SHORTEST_EXAMPLE = 3
"""Tokens of the shortest answer with a label: prompt, answer, and the place of the answer of the other label."""


def num_examples(length: int) -> int:
    """Return the places of a row for examples, each an answer with a label or a pair: as many as could be in it."""
    return max(1, length // SHORTEST_EXAMPLE)
