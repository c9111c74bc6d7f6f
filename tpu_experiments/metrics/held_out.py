"""Loss, perplexity, bits per byte and accuracy from sums over documents, a model beside its base, and written answers.

Bits per byte leaves out the tokens that stand for no text, the ends of documents and turns, as lm-evaluation-harness
does, so that it can be held against numbers of other tokenizers and programs. The loss has them all. Answers are
scored by ROUGE (rouge-score) and exact match; rouge-score's own tokenizer keeps a to z and 0 to 9 alone, which tears
Romanian words apart at every letter with a mark, so it is given words of Unicode (lower case, without punctuation)."""

import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.metrics.bootstrap import Estimate, Sums, estimate, resampled_over
from tpu_experiments.metrics.labels import accuracy, f1_of_labels, macro_f1, majority_rate

ROUGE = ("rouge1", "rouge2", "rougeL")
SCORES = (*ROUGE, "exact_match")


class UnicodeWords:
    """Tokenizer with rouge_score's interface: words in lower case, NFC."""

    def tokenize(self, text: str) -> list[str]:
        """Return runs of letters, digits and underscores."""
        return re.findall(r"\w+", unicodedata.normalize("NFC", text).lower())


def answer_scores(written: Sequence[str], references: Sequence[str]) -> NDArray[np.float64]:
    """Return scores (N, 4) of N answers in the order of `SCORES`, each from 0 to 1.

    F1 of ROUGE-1, ROUGE-2 and ROUGE-L (Lin, ROUGE, 2004), and exact match, which ignores blanks at both ends.
    """
    from rouge_score.rouge_scorer import RougeScorer  # imports nltk and scipy: 0.6 s of every start

    scorer = RougeScorer(list(ROUGE), tokenizer=UnicodeWords())
    found = np.zeros((len(references), len(SCORES)))
    for row, (text, reference) in enumerate(zip(written, references, strict=True)):
        scored = scorer.score(reference, text)
        found[row] = [*(scored[kind].fmeasure for kind in ROUGE), text.strip() == reference.strip()]
    return found


COLUMNS = ("tokens", "bytes", "nats", "text_nats", "hits")
ALL = "all"
"""Name of the entry over all sources."""
MEASURES = ("loss", "perplexity", "bits_per_byte", "accuracy")
BOUNDS = {"perplexity": "perplexity_bound", "bits_per_byte": "bits_per_byte_bound"}
"""Names of measures whose loss is an upper bound of -log p."""


@dataclass(frozen=True)
class Resampling:
    """Settings of the bootstrap intervals."""

    num_resamples: int
    confidence: float
    seed: int


@dataclass(frozen=True)
class Comparison:
    """Measures of some held-out documents, for the base and the trained model."""

    num_documents: int
    num_tokens: int
    """Tokens that are predicted."""
    num_bytes: int
    """UTF-8 bytes of their text; 0 where the tokenizer does not report them."""
    base: dict[str, Estimate]
    """Estimates by the names of `MEASURES`; one that is not finite is left out."""
    trained: dict[str, Estimate] | None
    difference: dict[str, Estimate] | None
    """Trained minus base, with the interval over the same resampled documents."""
    share_better: float | None
    """Share of the resamples in which the trained model has the lower loss."""


def without(found: Comparison, measure: str) -> Comparison:
    """Return the comparison without one of its measures."""

    def rest(values: dict[str, Estimate] | None) -> dict[str, Estimate] | None:
        return None if values is None else {name: value for name, value in values.items() if name != measure}

    return replace(found, base=rest(found.base) or {}, trained=rest(found.trained), difference=rest(found.difference))


def as_bounds(found: Comparison) -> Comparison:
    """Return the comparison with the measures of a bound under names that say so (`BOUNDS`)."""

    def named(values: dict[str, Estimate] | None) -> dict[str, Estimate] | None:
        return None if values is None else {BOUNDS.get(name, name): value for name, value in values.items()}

    base, trained, difference = (named(values) for values in (found.base, found.trained, found.difference))
    return replace(found, base=base or {}, trained=trained, difference=difference)


def document_sums(
    document_L: NDArray[np.int64], *, num_documents: int, columns_L: Mapping[str, NDArray[np.float64]]
) -> Sums:
    """Sum the values of each token by document: (D, K), columns in the order of `COLUMNS`."""
    return np.stack(
        [np.bincount(document_L, weights=columns_L[name], minlength=num_documents) for name in COLUMNS], axis=1
    )


def compared_by_source(
    base: Mapping[str, Sums],
    trained: Mapping[str, Sums] | None,
    *,
    resampling: Resampling,
    measure: "Measure | None" = None,
) -> dict[str, Comparison]:
    """Compare the sums (D, K) of every source, and under `ALL` of all sources where there are several.

    Args:
        base: its first two columns count tokens and bytes.
        trained: sums of the same documents; None where there is the base alone.
        measure: what is made of the sums; None takes `measures`.
    """

    def compared(names: Sequence[str]) -> Comparison:
        return _compared(base, trained, names=names, resampling=resampling, measure=measure or measures)

    found = {name: compared([name]) for name in base}
    return found if len(found) == 1 else found | {ALL: compared(list(base))}


def compared_by_value(
    base: Mapping[str, Sums],
    trained: Mapping[str, Sums] | None,
    *,
    values: Mapping[str, Sequence[str]],
    resampling: Resampling,
    measure: "Measure | None" = None,
) -> dict[str, dict[str, Comparison]]:
    """The documents of each source by the value that each of them has, in the order of the values."""
    found: dict[str, dict[str, Comparison]] = {}
    for name, given in values.items():
        values_D = np.array(given)
        for value in sorted(set(given)):
            chosen_D = values_D == value
            sides = [None if side is None else {name: side[name][chosen_D]} for side in (base, trained)]
            assert sides[0] is not None
            found.setdefault(name, {})[value] = _compared(
                sides[0], sides[1], names=[name], resampling=resampling, measure=measure or measures
            )
    return found


def _compared(
    base: Mapping[str, Sums],
    trained: Mapping[str, Sums] | None,
    *,
    names: Sequence[str],
    resampling: Resampling,
    measure: "Measure",
) -> Comparison:
    sides = [base] if trained is None else [base, trained]
    parts = [np.concatenate([side[name] for side in sides], axis=1) for name in names]
    pair = _Pair(parts, width=base[names[0]].shape[1], resampling=resampling)
    base_estimates = pair.estimates(lambda sums: measure(sums[0]))
    counts = pair.total_1K[0]
    trained_estimates = difference = share = None
    if trained is not None:
        trained_estimates = pair.estimates(lambda sums: measure(sums[1]))
        difference = pair.estimates(lambda sums: _differences(measure(sums[1]), measure(sums[0])))
        share = pair.share(lambda sums: measure(sums[1])["loss"] < measure(sums[0])["loss"])
    return Comparison(
        pair.num_documents, int(counts[0]), int(counts[1]), base_estimates, trained_estimates, difference, share
    )


def compared_answers(base: Sums, trained: Sums | None, *, resampling: Resampling) -> dict[str, Any]:
    """Estimate the means of answer scores (N, 4), named as in `metrics/held_out.py`.

    Returns:
        `answers` (N) and `base`; with a trained model also `trained` and `difference`.
    """
    sides = [base] if trained is None else [base, trained]
    parts = [np.concatenate([side / len(side) for side in sides], axis=1)]
    pair = _Pair(parts, width=base.shape[1], resampling=resampling)

    def by_name(sums_RK: Sums) -> dict[str, Sums]:
        return dict(zip(SCORES, sums_RK.T, strict=True))

    found: dict[str, Any] = {"answers": len(base), "base": pair.estimates(lambda sums: by_name(sums[0]))}
    if trained is not None:
        found["trained"] = pair.estimates(lambda sums: by_name(sums[1]))
        found["difference"] = pair.estimates(lambda sums: by_name(sums[1] - sums[0]))
    return found


@dataclass(frozen=True)
class MeasureComparison:
    """Further measures of some held-out documents, for the base and the trained model."""

    num_documents: int
    num_tokens: int
    """Tokens that the measures are of."""
    base: dict[str, Estimate]
    """Estimates by the measure's name; one that is not finite is left out."""
    trained: dict[str, Estimate] | None
    difference: dict[str, Estimate] | None
    """Trained minus base, with the interval over the same resampled documents."""


Measure = Callable[[Sums], dict[str, Sums]]
"""Sums (R, K) to measures (R,) by name."""


def compared_measures(
    base: Mapping[str, Sums], trained: Mapping[str, Sums] | None, *, measure: Measure, resampling: Resampling
) -> dict[str, MeasureComparison]:
    """Compare what `measure` makes of the sums (D, K) of every source, and under `ALL` of several sources together.

    Args:
        base: its first column counts tokens; documents without one are left out.
        trained: sums of the same documents; None where there is the base alone.
    """
    sides = [base] if trained is None else [base, trained]
    width = next(iter(base.values())).shape[1]

    def compared(names: Sequence[str]) -> MeasureComparison:
        parts = [np.concatenate([side[name] for side in sides], axis=1) for name in names]
        pair = _Pair([part[part[:, 0] > 0] for part in parts], width=width, resampling=resampling)
        has_two = trained is not None
        return MeasureComparison(
            pair.num_documents,
            int(pair.total_1K[0, 0]),
            pair.estimates(lambda sums: measure(sums[0])),
            pair.estimates(lambda sums: measure(sums[1])) if has_two else None,
            pair.estimates(lambda sums: _differences(measure(sums[1]), measure(sums[0]))) if has_two else None,
        )

    names = [name for name, sums in base.items() if sums[:, 0].any()]
    found = {name: compared([name]) for name in names}
    return found if len(found) < 2 else found | {ALL: compared(names)}


def beside_counts(sums_RK: Sums) -> dict[str, Sums]:
    """Return accuracies of a masked language model and of two guesses, and by how much it exceeds each.

    Args:
        sums_RK: masked tokens, and those that model, unigrams and bigrams predict rightly.
    """
    tokens, hits, unigram, bigram = sums_RK.T
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "accuracy": hits / tokens,
            "unigram": unigram / tokens,
            "bigram": bigram / tokens,
            "above_unigram": (hits - unigram) / tokens,
            "above_bigram": (hits - bigram) / tokens,
        }


def pseudo_perplexity(sums_RK: Sums) -> dict[str, Sums]:
    """Return exp of the mean loss of tokens that were masked one at a time.

    Args:
        sums_RK: tokens, and their loss in nats.
    """
    tokens, nats = sums_RK.T
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return {"pseudo_perplexity": np.exp(nats / tokens)}


def detection(sums_RK: Sums) -> dict[str, Sums]:
    """Return how well replaced tokens are found, and the accuracy of taking every token for an original.

    Precision is the share of replaced ones among the tokens that are taken for replaced, recall the share of the
    replaced ones that are found, and F1 their harmonic mean.

    Args:
        sums_RK: tokens, replaced ones, those taken for replaced, and those of them that are.
    """
    tokens, replaced, said, found = sums_RK.T
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "accuracy": 1 - (replaced + said - 2 * found) / tokens,
            "majority": 1 - replaced / tokens,
            "precision": found / said,
            "recall": found / replaced,
            "f1": 2 * found / (replaced + said),
        }


FURTHER: dict[str, Measure] = {
    "baselines": beside_counts,
    "pseudo_perplexity": pseudo_perplexity,
    "detection": detection,
}
"""Further measures by their name in test_results.json."""


@dataclass(frozen=True)
class LabelComparison:
    """Measures of a classifier on some held-out texts, before and after training."""

    num_texts: int
    majority: float
    """Accuracy of giving every text the most frequent label."""
    labelled: dict[str, int]
    """Texts of every label."""
    base: dict[str, Estimate]
    """`accuracy` and `macro_f1`."""
    trained: dict[str, Estimate] | None
    difference: dict[str, Estimate] | None
    """Trained minus base, with the interval over the same resampled texts."""
    f1: dict[str, dict[str, float | None]]
    """F1 of every label, by `base` and `trained`; None where the label is neither predicted nor present."""


LabelPairs = NDArray[np.int64]
"""Number of the label and of the predicted one of D texts, (D, 2)."""


def compared_labels(
    base: Mapping[str, LabelPairs],
    trained: Mapping[str, LabelPairs] | None,
    *,
    labels: Sequence[str],
    resampling: Resampling,
) -> dict[str, LabelComparison]:
    """Compare the predictions for every source, and under `ALL` for all sources where there are several."""

    def compared(names: Sequence[str]) -> LabelComparison:
        sides = {"base": base} if trained is None else {"base": base, "trained": trained}
        parts = [np.concatenate([_label_sums(side[name], len(labels)) for side in sides.values()], 1) for name in names]
        pair = _Pair(parts, width=3 * len(labels), resampling=resampling)
        labelled_C = np.split(pair.total_1K[0, : 3 * len(labels)], 3)[2]
        scores = {
            side: f1_of_labels(*np.split(sums, 3))
            for side, sums in zip(sides, np.split(pair.total_1K[0], len(sides)), strict=True)
        }
        has_two = trained is not None
        return LabelComparison(
            pair.num_documents,
            float(majority_rate(labelled_C)),
            {label: int(count) for label, count in zip(labels, labelled_C, strict=True)},
            pair.estimates(lambda sums: _of_labels(sums[0])),
            pair.estimates(lambda sums: _of_labels(sums[1])) if has_two else None,
            pair.estimates(lambda sums: _differences(_of_labels(sums[1]), _of_labels(sums[0]))) if has_two else None,
            {
                side: {label: float(v) if np.isfinite(v) else None for label, v in zip(labels, values, strict=True)}
                for side, values in scores.items()
            },
        )

    found = {name: compared([name]) for name in base}
    return found if len(found) == 1 else found | {ALL: compared(list(base))}


def _label_sums(pairs_D2: LabelPairs, count: int) -> Sums:
    """Return the texts predicted rightly, predicted and labelled so, for every label: (D, 3 C) of 0 and 1."""
    labelled_DC, predicted_DC = (pairs_D2[:, side, None] == np.arange(count) for side in range(2))
    return np.concatenate([labelled_DC & predicted_DC, predicted_DC, labelled_DC], axis=1).astype(np.float64)


def _of_labels(sums_RK: Sums) -> dict[str, NDArray[np.float64]]:
    right_RC, predicted_RC, labelled_RC = np.split(sums_RK, 3, axis=1)
    return {
        "accuracy": accuracy(right_RC, labelled_RC),
        "macro_f1": macro_f1(f1_of_labels(right_RC, predicted_RC, labelled_RC)),
    }


class _Pair:
    """Sums over documents of one model, or of two side by side: in total and over resampled documents."""

    def __init__(self, parts: Sequence[Sums], *, width: int, resampling: Resampling) -> None:
        generator = np.random.Generator(np.random.Philox(key=resampling.seed))
        self.total_1K = np.sum([part.sum(0) for part in parts], axis=0)[None]
        self._drawn_RK = resampled_over(parts, num_resamples=resampling.num_resamples, generator=generator)
        self._confidence, self._width = resampling.confidence, width
        self.num_documents = sum(map(len, parts))

    def _sides(self, sums_RK: Sums) -> list[Sums]:
        return [sums_RK[:, start : start + self._width] for start in range(0, sums_RK.shape[1], self._width)]

    def estimates(self, values_of: Callable[[list[Sums]], dict[str, Sums]]) -> dict[str, Estimate]:
        """Estimate values with their intervals; a value that is not finite is left out."""
        values, spreads = values_of(self._sides(self.total_1K)), values_of(self._sides(self._drawn_RK))
        return {
            name: estimate(
                float(value[0]), spreads[name], confidence=self._confidence, num_documents=self.num_documents
            )
            for name, value in values.items()
            if np.isfinite(value[0])
        }

    def share(self, is_so: Callable[[list[Sums]], NDArray[np.bool_]]) -> float | None:
        """Return the share of the resamples in which it holds; None for a single document."""
        return float(np.mean(is_so(self._sides(self._drawn_RK)))) if self.num_documents > 1 else None


def _differences(some: dict[str, Sums], others: dict[str, Sums]) -> dict[str, Sums]:
    return {name: values - others[name] for name, values in some.items()}


def measures(sums_RK: Sums) -> dict[str, NDArray[np.float64]]:
    """Return the measures (R,) of R rows of sums; NaN where the divisor is 0."""
    tokens, num_bytes, nats, text_nats, hits = sums_RK.T
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        loss = nats / tokens
        return {
            "loss": loss,
            "perplexity": np.exp(loss),
            "bits_per_byte": np.where(num_bytes > 0, text_nats / (math.log(2) * num_bytes), np.nan),
            "accuracy": hits / tokens,
        }
