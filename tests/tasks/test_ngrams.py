"""Unigram and bigram guesses of masked tokens: against counts by hand, and their measures with intervals."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from tpu_experiments.data.held_out import HeldOut
from tpu_experiments.data.rows import Rows
from tpu_experiments.data.steps.pack import FlatTokens
from tpu_experiments.metrics.held_out import ALL, Resampling, beside_counts, compared_measures
from tpu_experiments.objectives.vocabulary import Vocabulary
from tpu_experiments.tasks.evaluate import ngrams
from tpu_experiments.tasks.evaluate.ngrams import counted

VOCABULARY = Vocabulary(1, 12, ((0, 2),))


def rows(seed: int, num: int = 40) -> Rows:
    """Rows of two documents, each begun by the special token 2, with padding behind."""
    generator = np.random.default_rng(seed)
    segments = np.repeat([[1] * 9 + [2] * 8 + [0] * 3], num, 0).astype(np.int32)
    ids = np.where(segments > 0, generator.integers(3, 12, (num, 20)), 0).astype(np.int32)
    ids[:, [0, 9]] = 2
    positions = np.repeat([[*range(9), *range(8), 0, 0, 0]], num, 0).astype(np.int32)
    return Rows(ids, (positions > 0) & (segments > 0), positions, segments)


def held_out(*documents: list[int]) -> HeldOut:
    ids = np.concatenate(documents).astype(np.int32)
    return HeldOut("x", "text", FlatTokens(ids, np.ones(len(ids), np.uint8), np.array(list(map(len, documents)))), 1)


def test_guesses_are_the_most_frequent_tokens(monkeypatch):
    monkeypatch.setattr(ngrams, "ROWS", 7)
    parts = [rows(0), rows(1, num=3)]
    found = counted(parts, vocabulary=VOCABULARY)
    documents = [part.ids_NT[r, span].tolist() for part in parts for r in range(part.num_rows)
                 for span in (slice(0, 9), slice(9, 17))]  # fmt: skip
    unigrams = Counter(token for document in documents for token in document[1:])
    pairs = Counter(pair for document in documents for pair in pairwise(document))
    best = max(unigrams, key=lambda token: (unigrams[token], -token))
    assert (found.num_tokens, found.commonest) == (sum(unigrams.values()), best)
    unigram, bigram = found.guesses(held_out([2, *range(3, 12)], [5], [2, 4], [11, 1, 40, 4]))
    assert set(unigram.tolist()) == {best}
    lefts = [None, 2, *range(3, 11), None, None, 2, None, 11, None, None]  # 1 and 40 were never seen
    expected = [best if left is None else max((count, -token) for (first, token), count in pairs.items()
                                              if first == left)[1] * -1 for left in lefts]  # fmt: skip
    assert bigram.tolist() == expected
    assert not VOCABULARY.is_special(bigram).any()


def test_of_many_tokens_rows_at_equal_distances_are_counted(monkeypatch, caplog):
    part = rows(0)
    part.ids_NT[::3] = np.where(part.segments_NT[::3] > 0, 7, 0)
    part.ids_NT[1::3] = 5
    monkeypatch.setattr(ngrams, "MOST_TOKENS", 40 * 20 // 3 + 1)
    found = counted([part], vocabulary=VOCABULARY)
    assert (found.commonest, found.num_tokens) == (7, 14 * 15)
    assert found.after_V[7] == 7


def test_nothing_to_guess_is_no_guess():
    nothing = rows(0)
    nothing.learn_NT[:] = False
    assert counted([nothing], vocabulary=VOCABULARY) is None


def test_measures_stand_beside_the_guesses_with_intervals():
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 30, 60)
    hits = [generator.binomial(tokens, share) for share in (0.6, 0.1, 0.3)]
    trained = {"a": np.stack([tokens, *hits], 1).astype(float)}
    base = {"a": trained["a"].copy()}
    base["a"][:, 1] = 0
    found = compared_measures(base, trained, measure=beside_counts, resampling=Resampling(500, 0.95, 0))
    assert list(found) == ["a"]
    own, total = found["a"], tokens.sum()
    assert (own.num_documents, own.num_tokens) == ((tokens > 0).sum(), total)
    assert own.trained["accuracy"].value == pytest.approx(hits[0].sum() / total)
    assert own.trained["above_bigram"].value == pytest.approx((hits[0] - hits[2]).sum() / total)
    assert 0 < own.trained["above_bigram"].low < own.trained["above_bigram"].value < own.trained["above_bigram"].high
    assert own.base["unigram"] == own.trained["unigram"]
    assert own.difference["bigram"].value == 0
    both = compared_measures(
        base | {"b": base["a"] * 0, "c": base["a"]}, None, measure=beside_counts, resampling=Resampling(100, 0.95, 0)
    )
    assert (list(both), both[ALL].num_tokens) == (["a", "c", ALL], 2 * total)
    assert both[ALL].trained is None
