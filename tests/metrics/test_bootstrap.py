"""Intervals by the bootstrap against scipy's, and what they must not depend on."""

import numpy as np
import pytest
from scipy.stats import bootstrap

from tpu_experiments.metrics.bootstrap import estimate, resampled_over, resampled_sums

NUM = 4000


def sums(num_documents=80, *, seed=0):
    """(D, 2): nats and tokens of documents of many lengths."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(5, 500, num_documents)
    return np.stack([tokens * generator.normal(3.0, 0.5, num_documents), tokens], axis=1)


def drawn(parts, *, seed=0):
    return resampled_over(parts, num_resamples=NUM, generator=np.random.Generator(np.random.Philox(key=seed)))


def interval(parts):
    resampled = drawn(parts)
    total = np.sum([part.sum(0) for part in parts], axis=0)
    ratio = resampled[:, 0] / resampled[:, 1]
    return estimate(total[0] / total[1], ratio, confidence=0.95, num_documents=sum(map(len, parts)))


def test_the_interval_is_scipys_percentile_interval():
    nats, tokens = sums().T
    found = interval([sums()])
    theirs = bootstrap(
        (nats, tokens),
        lambda n, t, axis: n.sum(axis) / t.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=NUM,
        method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval
    width = theirs.high - theirs.low
    assert found.low == pytest.approx(theirs.low, abs=0.06 * width)
    assert found.high == pytest.approx(theirs.high, abs=0.06 * width)
    assert found.low < found.value < found.high


def test_every_source_keeps_its_number_of_documents():
    ones = [np.ones((n, 1)) for n in (3, 40)]
    assert (drawn(ones) == 43).all()


def test_large_and_small_chunks_draw_as_many(monkeypatch):
    monkeypatch.setattr("tpu_experiments.metrics.bootstrap.CHUNK_NUMBERS", 100)
    found = resampled_sums(sums(), num_resamples=7, generator=np.random.default_rng(0))
    assert found.shape == (7, 2)


def test_one_document_has_no_interval():
    found = interval([sums(1)])
    assert (found.low, found.high) == (None, None)


def test_values_that_are_no_numbers_are_left_out():
    found = estimate(1.0, np.array([np.nan, 1.0, 1.0, np.inf]), confidence=0.9, num_documents=3)
    assert (found.low, found.high) == (1.0, 1.0)
