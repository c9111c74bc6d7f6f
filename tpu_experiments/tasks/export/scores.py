"""Comparison of an export of a decoder that scores texts with the model that was trained: by scores of whole texts.

The tests are those of parity.py but for predictions: the scores must be those of the trained model with the form's
rounding, and hold what training changed. How often the better answer has the higher score is what task=evaluate tells.
Legend: D documents.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from tpu_experiments.tasks.export.parity import (
    PART_OF_ROUNDING,
    DocumentSums,
    Parity,
    Texts,
    kept_of,
    not_exact,
    not_kept,
    not_of_form,
    not_tokenized,
    rms,
    with_ends,
)

Scores = list[float]
"""Score of every document."""


class Scorer(Protocol):
    """A model in memory that scores texts."""

    name: str
    """The library that read it, with its version."""

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text alone, without any before or after it."""
        ...

    def score(self, ids: Sequence[int]) -> float:
        """Return the score of a text."""
        ...


class ScoreReference:
    """Scores of the texts by the trained model, and by its base."""

    def __init__(self, model: Scorer, texts: Texts) -> None:
        """Compute those of the trained model."""
        self.texts = texts
        self.scores = self.of_some(model)
        self.base: Scores | None = None
        """By the model that training began with; None where nothing was trained."""
        self.ids = [model.ids(line) for line in texts.lines]

    def set_base(self, model: Scorer) -> None:
        """Compute the scores by the model that training began with."""
        self.base = self.of_some(model)

    def of_some(self, model: Scorer, *, name: str = "") -> Scores:
        """Return the scores by a model; of all documents, as a score is one number of each."""
        return [model.score(ids) for ids in self.texts.documents]


def compare_scores(
    trained: ScoreReference,
    export: Scorer,
    *,
    form: str,
    arithmetic: torch.dtype,
    is_exact: bool,
    rounded: Scores | None = None,
) -> Parity:
    """Compare an export with the trained model.

    Args:
        is_exact: whether the files hold float32, so that scores may differ by rounding alone.
        rounded: scores by the trained model with the form's rounding; None where that cannot be computed.
    """
    theirs, num = trained.of_some(export), len(trained.scores)
    unknown: list[float | None] = [None] * num
    found = [
        _sums(*of_document)
        for of_document in zip(trained.scores, theirs, rounded or unknown, trained.base or unknown, strict=True)
    ]
    largest = max(sums.largest for sums in found)
    rounding, beyond, kept = rms(found, "rounding"), rms(found, "beyond"), kept_of(found)
    different = [line for line, ids in zip(trained.texts.lines, trained.ids, strict=True) if export.ids(line) != ids]
    reasons = [
        *([] if all(map(math.isfinite, theirs)) else ["a score is not finite"]),
        *(not_exact(largest, what="scores") if is_exact and arithmetic == torch.float32 else ()),
        *not_of_form(rounding, beyond, part=PART_OF_ROUNDING, what="scores", unit=""),
        *not_kept(kept),
        *not_tokenized(len(different), of=len(trained.ids)),
    ]
    return Parity(
        form=form,
        verdict="worse" if reasons else "ok",
        reason="; ".join(reasons),
        reader=export.name,
        arithmetic=str(arithmetic).removeprefix("torch."),
        data=trained.texts.origin,
        documents=num,
        tokens=sum(map(len, trained.texts.documents)),
        rounding=rounding,
        beyond_rounding=beyond,
        **with_ends("kept", kept),
        lines=len(trained.ids),
        different_lines=len(different),
        first_different_line=different[0] if different else "",
        mean_score=sum(trained.scores) / num,
        export_mean_score=sum(theirs) / num,
        max_score_diff=largest,
    )


def _sums(ours: float, theirs: float, rounded: float | None, base: float | None) -> DocumentSums:
    """Return squares and products of the differences of one document's scores."""
    found = DocumentSums(1, ours, theirs, 0.0, abs(ours - theirs) if math.isfinite(theirs) else math.inf)
    if rounded is not None:
        found.rounding, found.beyond = (rounded - ours) ** 2, (theirs - rounded) ** 2
    if base is not None:
        found.effect, found.along = (ours - base) ** 2, (ours - base) * (theirs - base)
    return found
