"""Advantages of answers: how much better each was rewarded than the others to its prompt.

Legend: N answers, P prompts, S answers to each (a group), in this order.
"""

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAST_SPREAD = 1e-8
"""Groups whose rewards have a smaller standard deviation teach nothing."""
ADDED = 1e-4
"""Added to a standard deviation before it divides, as in TRL."""


@dataclass(frozen=True)
class Advantages:
    """Advantages of N answers."""

    values_N: NDArray[np.float32]
    """0 of answers without a reward, and of those without another in their group to compare with."""
    num_groups: int
    num_without_spread: int
    """Groups whose rewards are all the same, or that have fewer than two."""


def advantages(rewards_N: NDArray[np.float64], *, samples: int, scale: str, leaves_one_out: bool = False) -> Advantages:
    """Return rewards less a baseline of their group, which rewards that are NaN have no part in.

    The baseline is the group's mean (GRPO), or, with `leaves_one_out`, the mean of the others (RLOO).

    Args:
        samples: S.
        scale: `group` divides by the group's standard deviation, `batch` by that of all rewards, of RLOO of all
            advantages, whose mean it also subtracts; `none` divides by nothing.
    """
    rewards_PS = rewards_N.reshape(-1, samples)
    known_PS = ~np.isnan(rewards_PS)
    count_P1 = known_PS.sum(1, keepdims=True)
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # of a group without rewards every figure is NaN
        spread_P1 = np.nanstd(rewards_PS, axis=1, ddof=1, keepdims=True)
        if leaves_one_out:
            found_PS = rewards_PS - (np.nansum(rewards_PS, 1, keepdims=True) - rewards_PS) / (count_P1 - 1)
            if scale == "batch":
                found_PS = (found_PS - np.nanmean(found_PS)) / (np.nanstd(found_PS, ddof=1) + ADDED)
        else:
            found_PS = rewards_PS - np.nanmean(rewards_PS, 1, keepdims=True)
            if scale != "none":
                spread = spread_P1 if scale == "group" else np.nanstd(rewards_PS, ddof=1)
                found_PS = found_PS / (spread + ADDED)
    flat_P = (count_P1 < 2)[:, 0] | (spread_P1[:, 0] <= LEAST_SPREAD)
    return Advantages(np.nan_to_num(found_PS, nan=0.0).reshape(-1).astype(np.float32), len(flat_P), int(flat_P.sum()))
