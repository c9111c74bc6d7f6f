"""Comparison of an export, read back from disk by another library, with the model that was trained.

Legend: T tokens of a document, V vocabulary, the tokens of the two models' common vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpu_experiments.metrics.bootstrap import Estimate, Sums, estimate, resampled_sums
from tpu_experiments.tasks.export.readers import Reader

MAX_LOG_PROB_DIFF = 1e-3
"""Largest difference of a log-probability in forms that hold float32: 10 times what summing in another order gives."""
NUM_RESAMPLES = 2000
"""Resamples of documents, of which two ends of an interval are taken."""
MAX_PERPLEXITY_RATIO = {
    "peft": 1.002,
    "merged": 1.002,
    "f32": 1.0002,
    "f16": 1.002,
    "bf16": 1.002,
    "q8_0": 1.005,
    "int8": 1.01,
    "nf4": 1.05,
    "rtn": 1.25,
    "gptq": 1.25,
    "vptq": 1.25,
    "bitnet": 1.002,
    "lr_qat": 1.01,
}
"""Largest perplexity of an export over that of the trained model, by form or by data type of a GGUF file."""


@dataclass(frozen=True)
class Texts:
    """Held-out text to compare on."""

    documents: list[list[int]]
    """Token ids of documents, at least two each."""
    lines: list[str]
    prompts: list[list[int]]
    """Beginnings of documents that both models continue."""
    origin: str
    """The data that they are from."""


@dataclass(frozen=True)
class Parity:
    """Outcome of one comparison."""

    form: str
    """A form of task=export, a method of task=quantize, or a GGUF file by its data type."""
    verdict: str
    """`ok`, `worse`, or `not checked`."""
    reason: str
    """Why it is worse or was not checked; else empty."""
    reader: str = ""
    arithmetic: str = ""
    """Data type in which both models computed."""
    data: str = ""
    documents: int = 0
    tokens: int = 0
    perplexity: float | None = None
    """Of the trained model."""
    export_perplexity: float | None = None
    perplexity_ratio: float | None = None
    perplexity_ratio_low: float | None = None
    """Lower end of the ratio's 95 % interval over documents; `perplexity_ratio_high` is the upper one."""
    perplexity_ratio_high: float | None = None
    max_perplexity_ratio: float | None = None
    mean_kl: float | None = None
    """Mean over tokens of the divergence KL(trained | export), nats."""
    max_log_prob_diff: float | None = None
    """Largest absolute difference of a log-probability, over all tokens and the whole vocabulary."""
    same_greedy: int | None = None
    """Tokens of the greedy continuations that are equal, up to the first that differs of each."""
    greedy: int | None = None
    lines: int = 0
    different_lines: int = 0
    """Lines that the export's tokenizer splits into other tokens."""
    first_different_line: str = ""

    def fields(self) -> dict[str, Any]:
        """Return the fields of parity.json."""
        return asdict(self)


class Reference:
    """What the trained model says of the texts: computed once, kept on disk while the exports are read."""

    def __init__(self, model: Reader, texts: Texts, *, num: int, folder: Path) -> None:
        """Compute.

        Args:
            num: tokens of each greedy continuation.
            folder: place for T x V float32 of each document.
        """
        self.texts, self.folder, self.num = texts, folder, num
        for number, ids in enumerate(texts.documents):
            torch.save(model.log_probs(ids), folder / f"{number}.pt")
        self.ids = [model.ids(line) for line in texts.lines]
        self.written = [model.greedy(prompt, num=num) for prompt in texts.prompts]

    def log_probs(self) -> Iterator[tuple[list[int], Tensor]]:
        """Yield ids (T) and log-probabilities (T, V) of each document."""
        for number, ids in enumerate(self.texts.documents):
            yield ids, torch.load(self.folder / f"{number}.pt")


def compare(
    trained: Reference, export: Reader, *, form: str, arithmetic: torch.dtype, is_exact: bool, max_ratio: float | None
) -> Parity:
    """Compare an export with the trained model.

    Args:
        is_exact: whether the files hold float32, so that log-probabilities may differ by rounding alone.
        max_ratio: largest ratio of perplexities; None takes the form's.
    """
    limit = max_ratio or MAX_PERPLEXITY_RATIO[form]
    kl, largest = 0.0, 0.0
    by_document: list[tuple[float, float, int]] = []
    for ids, ours_TV in trained.log_probs():
        theirs_TV = export.log_probs(ids)
        common = min(ours_TV.shape[1], theirs_TV.shape[1])
        ours_TV, theirs_TV = ours_TV[:-1, :common], theirs_TV[:-1, :common]
        next_T1 = torch.tensor(ids[1:])[:, None]
        nats = [
            -float(log_probs_TV.gather(1, next_T1).sum(dtype=torch.float64)) for log_probs_TV in (ours_TV, theirs_TV)
        ]
        by_document.append((nats[0], nats[1], len(ids) - 1))
        difference_TV = ours_TV - theirs_TV
        kl += float((ours_TV.exp() * difference_TV).sum(dtype=torch.float64))
        largest = max(largest, float(difference_TV.abs().max())) if bool(difference_TV.isfinite().all()) else math.inf
    sums_D3 = np.array(by_document, dtype=np.float64)
    of_trained, of_export, tokens = sums_D3.sum(0)
    interval = ratio_interval(sums_D3)
    greedy = [export.greedy(prompt, num=trained.num) for prompt in trained.texts.prompts]
    same = sum(_same(one, other) for one, other in zip(trained.written, greedy, strict=True))
    split = [export.ids(line) for line in trained.texts.lines]
    different = [line for line, one, other in zip(trained.texts.lines, trained.ids, split, strict=True) if one != other]
    ratio = interval.value
    reasons = []
    if not math.isfinite(ratio) or max(ratio, 1 / ratio) > limit:
        reasons.append(f"perplexity {ratio:.5f} times the trained model's, and {limit} is the most")
    if is_exact and largest > MAX_LOG_PROB_DIFF and arithmetic == torch.float32:
        reasons.append(f"log-probabilities differ by up to {largest:.2g}, and {MAX_LOG_PROB_DIFF} is the most")
    if different:
        reasons.append(f"its tokenizer splits {len(different)} of {len(split)} lines into other tokens")
    return Parity(
        form=form,
        verdict="worse" if reasons else "ok",
        reason="; ".join(reasons),
        reader=export.name,
        arithmetic=str(arithmetic).removeprefix("torch."),
        data=trained.texts.origin,
        documents=len(trained.texts.documents),
        tokens=int(tokens),
        perplexity=math.exp(of_trained / tokens),
        export_perplexity=math.exp(of_export / tokens),
        perplexity_ratio=ratio,
        perplexity_ratio_low=interval.low,
        perplexity_ratio_high=interval.high,
        max_perplexity_ratio=limit,
        mean_kl=kl / float(tokens),
        max_log_prob_diff=largest,
        same_greedy=same,
        greedy=trained.num * len(greedy),
        lines=len(split),
        different_lines=len(different),
        first_different_line=different[0] if different else "",
    )


def ratio_interval(sums_D3: Sums) -> Estimate:
    """Return the ratio of perplexities with its 95 % interval over documents, both models on the same resamples.

    Args:
        sums_D3: for each document the summed losses of the trained model and of the export, nats, and the tokens.
    """

    def ratio(sums: Sums) -> Sums:
        with np.errstate(over="ignore"):
            return np.exp((sums[..., 1] - sums[..., 0]) / sums[..., 2])

    drawn_R3 = resampled_sums(sums_D3, num_resamples=NUM_RESAMPLES, generator=np.random.default_rng(0))
    whole = float(ratio(sums_D3.sum(0)))
    return estimate(whole, ratio(drawn_R3), confidence=0.95, num_documents=len(sums_D3))


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
