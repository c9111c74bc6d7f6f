"""Loss, perplexity, bits per byte and accuracy from sums, one model and two."""

import math

import numpy as np
import pytest

from tpu_experiments.metrics.held_out import (
    ALL,
    COLUMNS,
    Resampling,
    compared_answers,
    compared_by_source,
    compared_by_value,
    document_sums,
)

HOW = Resampling(num_resamples=500, confidence=0.9, seed=3)


def sums(num_documents, *, seed, shift=0.0):
    """(D, 5) in the order of COLUMNS; `shift` nats are added to every token."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(5, 300, num_documents).astype(float)
    nats = tokens * (generator.normal(3.0, 0.5, num_documents) + shift)
    return np.stack([tokens, 4 * tokens, nats, 0.9 * nats, np.floor(tokens / 3)], axis=1)


def test_the_measures_are_their_formulas():
    total = sums(20, seed=0).sum(0)
    (found,) = compared_by_source({"a": sums(20, seed=0)}, None, resampling=HOW).values()
    values = {name: told.value for name, told in found.base.items()}
    assert values == pytest.approx(
        {
            "loss": total[2] / total[0],
            "perplexity": math.exp(total[2] / total[0]),
            "bits_per_byte": total[3] / math.log(2) / total[1],
            "accuracy": total[4] / total[0],
        }
    )
    assert (found.num_documents, found.num_tokens, found.num_bytes) == (20, total[0], total[1])
    assert found.trained is found.difference is found.share_better is None


def test_all_sources_together_are_beside_each():
    base = {"a": sums(20, seed=0), "b": sums(5, seed=1)}
    found = compared_by_source(base, None, resampling=HOW)
    total = sum(part.sum(0) for part in base.values())
    assert list(found) == ["a", "b", ALL]
    assert found[ALL].base["loss"].value == pytest.approx(total[2] / total[0])


def test_what_both_models_find_hard_is_not_in_the_interval_of_their_difference():
    base, better = sums(40, seed=0), sums(40, seed=0, shift=-0.1)
    (found,) = compared_by_source({"a": base}, {"a": better}, resampling=HOW).values()
    difference = found.difference["loss"]
    assert (difference.value, difference.low, difference.high) == pytest.approx((-0.1, -0.1, -0.1))
    assert found.base["loss"].high - found.base["loss"].low > 0.05
    assert found.share_better == 1.0


def test_a_model_is_not_better_than_itself():
    (found,) = compared_by_source({"a": sums(40, seed=0)}, {"a": sums(40, seed=0)}, resampling=HOW).values()
    assert found.difference["loss"].value == 0.0
    assert found.share_better == 0.0


def test_what_cannot_be_known_is_left_out():
    nothing = sums(4, seed=0) * np.array([1.0, 0.0, 400.0, 1.0, 1.0])
    (found,) = compared_by_source({"a": nothing}, None, resampling=HOW).values()
    assert set(found.base) == {"loss", "accuracy"}  # no bytes, and exp of 1,200


def test_sums_of_documents_are_those_of_their_tokens():
    columns = {name: np.arange(5.0) * (i + 1) for i, name in enumerate(COLUMNS)}
    found = document_sums(np.array([0, 0, 2, 2, 2]), num_documents=3, columns_L=columns)
    np.testing.assert_array_equal(found, [[1, 2, 3, 4, 5], [0] * 5, [9, 18, 27, 36, 45]])


def test_scores_of_answers_are_means():
    base, trained = np.zeros((10, 4)), np.full((10, 4), 0.5)
    found = compared_answers(base, trained, resampling=HOW)
    assert found["answers"] == 10
    assert found["trained"]["rougeL"].value == pytest.approx(0.5)
    assert found["difference"]["exact_match"].low == pytest.approx(0.5)
    assert "trained" not in compared_answers(base, None, resampling=HOW)


def test_documents_are_told_apart_by_their_values():
    base, trained = ({"a": sums(6, seed=0), "b": sums(3, seed=1)}, {"a": sums(6, seed=0, shift=-0.1)})
    found = compared_by_value(base, trained | {"b": base["b"]}, values={"a": list("xyxyyx")}, resampling=HOW)
    assert {name: list(values) for name, values in found.items()} == {"a": ["x", "y"]}
    for value, rows in (("x", [0, 2, 5]), ("y", [1, 3, 4])):
        alone = compared_by_source({"a": base["a"][rows]}, {"a": trained["a"][rows]}, resampling=HOW)["a"]
        assert found["a"][value] == alone
        assert alone.num_documents == 3
