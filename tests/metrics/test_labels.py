"""Accuracy, F1 and the majority rate, against their definitions on few texts."""

import numpy as np
import pytest

from tpu_experiments.metrics.held_out import ALL, Resampling, compared_labels
from tpu_experiments.metrics.labels import accuracy, f1_of_labels, macro_f1, majority_rate

LABELS = ("a", "b", "c", "d")
TRUE = [0, 0, 0, 0, 1, 1, 2]
GUESSED = [0, 0, 1, 2, 1, 0, 1]
# a: 2 of 3 predicted and 4 present; b: 1 of 3 and 2; c: 0 of 1 and 1; d: neither.
F1 = [2 * 2 / (3 + 4), 2 * 1 / (3 + 2), 0.0, np.nan]
HOW = Resampling(200, 0.95, 0)


def counts(true, guessed):
    pairs = list(zip(true, guessed, strict=True))
    right = [sum(t == g == c for t, g in pairs) for c in range(4)]
    return right, [guessed.count(c) for c in range(4)], [true.count(c) for c in range(4)]


def test_f1_is_that_of_precision_and_recall():
    right, predicted, labelled = counts(TRUE, GUESSED)
    found = f1_of_labels(right, predicted, labelled)
    np.testing.assert_allclose(found, F1)
    precision, recall = 2 / 3, 2 / 4
    assert found[0] == pytest.approx(2 * precision * recall / (precision + recall))


def test_macro_f1_leaves_out_labels_that_are_nowhere():
    """As scikit-learn's f1_score, whose labels are by default those of the texts and of the predictions."""
    assert macro_f1(f1_of_labels(*counts(TRUE, GUESSED))) == pytest.approx((4 / 7 + 2 / 5 + 0) / 3)


def test_accuracy_and_majority():
    right, _, labelled = counts(TRUE, GUESSED)
    assert accuracy(right, labelled) == pytest.approx(3 / 7)
    assert majority_rate(labelled) == pytest.approx(4 / 7)
    assert np.isnan(accuracy([0, 0], [0, 0]))


def test_base_and_trained_are_compared_on_the_same_texts():
    base = np.array([TRUE, [0] * 7]).T
    trained = np.array([TRUE, GUESSED]).T
    found = compared_labels({"x": base}, {"x": trained}, labels=LABELS, resampling=HOW)["x"]
    assert (found.num_texts, found.labelled) == (7, {"a": 4, "b": 2, "c": 1, "d": 0})
    assert found.majority == found.base["accuracy"].value == pytest.approx(4 / 7)
    assert found.trained["macro_f1"].value == pytest.approx(np.nanmean(F1))
    assert found.difference["accuracy"].value == pytest.approx(-1 / 7)
    assert found.difference["accuracy"].low < -1 / 7 < found.difference["accuracy"].high
    assert found.f1["trained"] == pytest.approx({"a": F1[0], "b": F1[1], "c": 0.0, "d": None})
    assert found.f1["base"] == pytest.approx({"a": 8 / 11, "b": 0.0, "c": 0.0, "d": None})


def test_several_sources_are_counted_together():
    pairs = np.array([TRUE, GUESSED]).T
    found = compared_labels({"x": pairs[:3], "y": pairs[3:]}, None, labels=LABELS, resampling=HOW)
    assert list(found) == ["x", "y", ALL]
    assert found[ALL].num_texts == 7
    assert found[ALL].base["macro_f1"].value == pytest.approx(np.nanmean(F1))
    assert found[ALL].trained is None
    assert found[ALL].difference is None
