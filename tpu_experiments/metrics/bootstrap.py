"""Bootstrap confidence intervals of ratios of sums over documents.

The percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13) with the document as
the unit: tokens of one document are not independent of each other. Two models are compared on the same resampled
documents (paired bootstrap: Koehn, Statistical Significance Tests for Machine Translation Evaluation, EMNLP 2004),
which cancels the difficulty that both share. Legend: D documents, K sums of each, R resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Sums = NDArray[np.float64]
CHUNK_NUMBERS = 2**23
"""Document counts that are held at once: 64 MiB."""


@dataclass(frozen=True)
class Estimate:
    """A value and the interval of its resampled values; no interval with less than two documents."""

    value: float
    low: float | None = None
    high: float | None = None


def resampled_sums(sums_DK: Sums, *, num_resamples: int, generator: np.random.Generator) -> Sums:
    """Return sums (R, K) over D documents drawn with replacement, R times.

    How often each document is drawn is sampled from a multinomial distribution.
    """
    num_documents = len(sums_DK)
    shares = np.full(num_documents, 1 / num_documents)
    step = max(1, CHUNK_NUMBERS // num_documents)
    drawn = [
        generator.multinomial(num_documents, shares, size=min(step, num_resamples - start)) @ sums_DK
        for start in range(0, num_resamples, step)
    ]
    return np.concatenate(drawn)


def resampled_over(parts: Sequence[Sums], *, num_resamples: int, generator: np.random.Generator) -> Sums:
    """Return sums (R, K) over several sources; each keeps its number of documents (stratified)."""
    drawn = [resampled_sums(part, num_resamples=num_resamples, generator=generator) for part in parts]
    return np.sum(drawn, axis=0)


def estimate(value: float, values_R: Sums, *, confidence: float, num_documents: int) -> Estimate:
    """Return the value with the percentile interval of its resampled values; non-finite ones are left out."""
    known = values_R[np.isfinite(values_R)]
    if num_documents < 2 or not len(known):
        return Estimate(value)
    low, high = np.quantile(known, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(value, float(low), float(high))
