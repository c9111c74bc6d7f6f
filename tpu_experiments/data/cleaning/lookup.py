"""Which of many numbers are among others, in little memory."""

import numpy as np
from numpy.typing import NDArray

AT_ONCE = 2**20  # 8 MiB of places


def is_among(values_D: NDArray[np.uint64], known_K: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether (D,) each value is one of K sorted ones; beside the result no array of D entries is made."""
    found_D = np.zeros(len(values_D), np.bool_)
    for start in range(0, len(values_D) if len(known_K) else 0, AT_ONCE):
        part = slice(start, start + AT_ONCE)
        place_B = np.minimum(np.searchsorted(known_K, values_D[part]), len(known_K) - 1)
        found_D[part] = known_K[place_B] == values_D[part]
    return found_D
