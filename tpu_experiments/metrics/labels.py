"""Measures of a classifier from counts of texts by label.

F1 of a label is 2 r / (p + l): r texts predicted rightly, p predicted, l labelled so. It is 0 where r is 0. Macro F1 is
its mean over the labels that are predicted or present, as scikit-learn's `f1_score(average="macro")` counts them.
Legend: C labels, N any number of leading dimensions.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Values = NDArray[np.float64]


def f1_of_labels(right: ArrayLike, predicted: ArrayLike, labelled: ArrayLike) -> Values:
    """Return the F1 (N, C) of every label; NaN where it is neither predicted nor present."""
    r, p, n = (np.asarray(each, np.float64) for each in (right, predicted, labelled))
    with np.errstate(invalid="ignore"):
        found: Values = 2 * r / (p + n)
    return found


def macro_f1(scores_NC: Values) -> Values:
    """Return the mean F1 (N,) over the labels that are predicted or present; NaN where none is."""
    is_known = np.isfinite(scores_NC)
    with np.errstate(invalid="ignore"):
        found: Values = np.where(is_known, scores_NC, 0.0).sum(-1) / is_known.sum(-1)
    return found


def accuracy(right_NC: ArrayLike, labelled_NC: ArrayLike) -> Values:
    """Return the share (N,) of texts that are predicted rightly; NaN without texts."""
    with np.errstate(invalid="ignore"):
        found: Values = np.sum(right_NC, -1) / np.asarray(np.sum(labelled_NC, -1), np.float64)
    return found


def majority_rate(labelled_NC: ArrayLike) -> Values:
    """Return the accuracy (N,) of giving every text the most frequent label; NaN without texts."""
    with np.errstate(invalid="ignore"):
        found: Values = np.max(labelled_NC, -1) / np.asarray(np.sum(labelled_NC, -1), np.float64)
    return found
