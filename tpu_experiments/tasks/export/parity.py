"""Comparison of an export, read back from disk by another library, with the model that was trained.

An export is worse if one of three things is so, each told in a sentence:

* It is not the trained model with the form's own rounding (rounding.py): the difference from that is more than a part
  of what the rounding itself does. This finds what goes wrong in merging, writing and reading, even where it is small
  beside the rounding.
* It lacks a part of what training changed, or has more of it: the base model, another scale of the adapter.
* It predicts worse: the whole interval of the perplexities' ratio is above the form's limit.

Legend: T tokens of a document, V vocabulary, the tokens of the two models' common vocabulary, D documents.
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
FLOAT32_RMS = 2e-4
"""Root mean square difference of log-probabilities that sums in another order stay below, in float32."""
PART_OF_ROUNDING = 0.05
"""Largest difference of an export from the trained model with the form's rounding, over what the rounding does.
Measured below 0.001 where nothing is wrong (tests/benchmarks/RESULTS.md)."""
PART_WITH_INPUTS = 2.0
"""The same where the library rounds the inputs of products too, which the yardstick does not: a fault that is smaller
than that rounding is not seen there."""
KEPT = (0.75, 1.25)
"""Range of the part of training's effect that an export holds; the base alone has 0, twice the adapter about 2."""
NUM_YARDSTICK = 4
"""Documents, the first ones, on which the base and the trained model with the form's rounding are computed."""
NUM_RESAMPLES = 2000
"""Resamples of documents, of which two ends of an interval are taken."""
MAX_PERPLEXITY_RATIO = {
    "peft": 1.002,
    "merged": 1.05,
    "f32": 1.0002,
    "f16": 1.05,
    "bf16": 1.05,
    "q8_0": 1.05,
    "int8": 1.05,
    "nf4": 1.25,
    "rtn": 1.25,
    "gptq": 1.25,
    "vptq": 1.25,
    "bitnet": 1.002,
    "lr_qat": 1.01,
}
"""Perplexity of an export over that of the trained model, by form or by data type of a GGUF file, which the interval
may not lie above. It bounds what a sound rounding may cost; faults are found by the other two comparisons."""


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
    rounding: float | None = None
    """Root mean square difference of log-probabilities that the form's rounding makes in the trained model, weighted by
    its probabilities, nats; None where the form's rounding cannot be computed."""
    beyond_rounding: float | None = None
    """That of the export from the trained model with the form's rounding."""
    kept: float | None = None
    """Part of training's effect that the export holds: the projection of its difference from the base on the trained
    model's, 1 for all. None where training changed nothing, as of a model without a run."""
    kept_low: float | None = None
    """Lower end of its 95 % interval over documents; `kept_high` is the upper one."""
    kept_high: float | None = None
    same_greedy: int | None = None
    """Tokens of the greedy continuations that are equal, up to the first that differs of each."""
    greedy: int | None = None
    lines: int = 0
    different_lines: int = 0
    """Lines that the export's tokenizer splits into other tokens."""
    first_different_line: str = ""
    mean_score: float | None = None
    """Of the trained model, over the documents, where it scores texts; it then has no perplexity, and differences of
    log-probabilities are those of scores."""
    export_mean_score: float | None = None
    max_score_diff: float | None = None
    """Largest absolute difference of a score."""

    def fields(self) -> dict[str, Any]:
        """Return the fields of parity.json."""
        return asdict(self)


class Account:
    """What a model says of documents: computed once, kept on disk."""

    def __init__(self, model: Reader, documents: Sequence[list[int]], *, folder: Path) -> None:
        """Compute; the folder receives T x V float32 of each document."""
        self.folder, self.num = folder, len(documents)
        folder.mkdir(exist_ok=True)  # the last form's, of as many documents
        for number, ids in enumerate(documents):
            torch.save(model.log_probs(ids), folder / f"{number}.pt")

    def log_probs(self, number: int) -> Tensor | None:
        """Return log-probabilities (T, V) of a document; None of one that was not computed."""
        return torch.load(self.folder / f"{number}.pt") if number < self.num else None


class Reference:
    """What the trained model says of the texts, and its base of some of them."""

    def __init__(self, model: Reader, texts: Texts, *, num: int, folder: Path) -> None:
        """Compute.

        Args:
            num: tokens of each greedy continuation.
            folder: place of the accounts.
        """
        self.texts, self.folder, self.num = texts, folder, num
        self.base: Account | None = None
        """Of the model that training began with; None where nothing was trained."""
        self.account = Account(model, texts.documents, folder=folder / "trained")
        self.ids = [model.ids(line) for line in texts.lines]
        self.written = [model.greedy(prompt, num=num) for prompt in texts.prompts]

    def set_base(self, model: Reader) -> None:
        """Compute what the model that training began with says."""
        self.base = self.of_some(model, name="base")

    def of_some(self, model: Reader, *, name: str) -> Account:
        """Return what a model says of the first documents."""
        return Account(model, self.texts.documents[:NUM_YARDSTICK], folder=self.folder / name)


@dataclass
class DocumentSums:
    """Sums over the tokens of a document, weighted by the trained model's probabilities where there are several."""

    tokens: int
    trained: float
    """Loss of the trained model, nats; `export` is the export's."""
    export: float
    kl: float
    largest: float
    rounding: float | None = None
    """Squared difference of the trained model with the form's rounding from the trained model."""
    beyond: float | None = None
    """Squared difference of the export from the former."""
    along: float | None = None
    """Product of the export's and the trained model's differences from the base."""
    effect: float | None = None
    """Squared difference of the trained model from the base."""


def _sums(ids: list[int], ours: Tensor, theirs: Tensor, *, rounded: Tensor | None, base: Tensor | None) -> DocumentSums:
    common = min(ours.shape[1], theirs.shape[1])
    ours_TV, theirs_TV = ours[:-1, :common], theirs[:-1, :common]
    next_T1 = torch.tensor(ids[1:])[:, None]
    losses = [-float(log_probs.gather(1, next_T1).sum(dtype=torch.float64)) for log_probs in (ours_TV, theirs_TV)]
    difference_TV, weight_TV = ours_TV - theirs_TV, ours_TV.exp()
    is_finite = bool(difference_TV.isfinite().all())
    found = DocumentSums(
        tokens=len(ids) - 1,
        trained=losses[0],
        export=losses[1],
        kl=float((weight_TV * difference_TV).sum(dtype=torch.float64)),
        largest=float(difference_TV.abs().max()) if is_finite else math.inf,
    )

    def product(one: Tensor, other: Tensor) -> float:
        return float((weight_TV * one * other).sum(dtype=torch.float64))

    if rounded is not None:
        by_rounding_TV = rounded[:-1, :common] - ours_TV
        found.rounding = product(by_rounding_TV, by_rounding_TV)
        by_rounding_TV += difference_TV
        found.beyond = product(by_rounding_TV, by_rounding_TV)
    if base is not None:
        of_training_TV = ours_TV - base[:-1, :common]
        found.effect = product(of_training_TV, of_training_TV)
        found.along = found.effect - product(difference_TV, of_training_TV)
    return found


def compare(
    trained: Reference,
    export: Reader,
    *,
    form: str,
    arithmetic: torch.dtype,
    is_exact: bool,
    max_ratio: float | None,
    rounded: Account | None = None,
    rounds_inputs: bool = False,
) -> Parity:
    """Compare an export with the trained model.

    Args:
        is_exact: whether the files hold float32, so that log-probabilities may differ by rounding alone.
        max_ratio: largest ratio of perplexities; None takes the form's.
        rounded: what the trained model with the form's rounding says; None where that cannot be computed.
        rounds_inputs: whether the library rounds the inputs of products.
    """
    limit = max_ratio or MAX_PERPLEXITY_RATIO[form]
    found = _sums_of_documents(trained, export, rounded=rounded)
    sums_D3 = np.array([(sums.trained, sums.export, sums.tokens) for sums in found], dtype=np.float64)
    of_trained, of_export, tokens = sums_D3.sum(0)
    interval, kept = ratio_interval(sums_D3), kept_of(found)
    largest = max(sums.largest for sums in found)
    rounding, beyond = (rms(found, name) for name in ("rounding", "beyond"))
    greedy = [export.greedy(prompt, num=trained.num) for prompt in trained.texts.prompts]
    split = [export.ids(line) for line in trained.texts.lines]
    different = [line for line, one, other in zip(trained.texts.lines, trained.ids, split, strict=True) if one != other]
    reasons = [
        *_worse_than(interval, limit=limit),
        *(not_exact(largest) if is_exact and arithmetic == torch.float32 else ()),
        *not_of_form(rounding, beyond, part=PART_WITH_INPUTS if rounds_inputs else PART_OF_ROUNDING),
        *not_kept(kept),
        *not_tokenized(len(different), of=len(split)),
    ]
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
        **with_ends("perplexity_ratio", interval),
        max_perplexity_ratio=limit,
        mean_kl=sum(sums.kl for sums in found) / float(tokens),
        max_log_prob_diff=largest,
        rounding=rounding,
        beyond_rounding=beyond,
        **with_ends("kept", kept),
        same_greedy=sum(_same(one, other) for one, other in zip(trained.written, greedy, strict=True)),
        greedy=trained.num * len(greedy),
        lines=len(split),
        different_lines=len(different),
        first_different_line=different[0] if different else "",
    )


def _sums_of_documents(trained: Reference, export: Reader, *, rounded: Account | None) -> list[DocumentSums]:
    """Return the sums of every document, an export read once."""
    found = []
    for number, ids in enumerate(trained.texts.documents):
        ours = trained.account.log_probs(number)
        assert ours is not None, "it is of all documents"
        others = {
            name: None if account is None else account.log_probs(number)
            for name, account in (("rounded", rounded), ("base", trained.base))
        }
        found.append(_sums(ids, ours, export.log_probs(ids), **others))
    return found


def _worse_than(ratio: Estimate, *, limit: float) -> Iterator[str]:
    if not math.isfinite(ratio.value) or not _ends(ratio)[0] <= limit:
        yield f"perplexity {_told(ratio, digits=5)} times the trained model's, and {limit} is the most"


def not_exact(largest: float, *, what: str = "log-probabilities") -> Iterator[str]:
    if largest > MAX_LOG_PROB_DIFF:
        yield f"{what} differ by up to {largest:.2g}, and {MAX_LOG_PROB_DIFF} is the most"


def not_of_form(
    rounding: float | None, beyond: float | None, *, part: float, what: str = "log-probabilities", unit: str = " nats"
) -> Iterator[str]:
    if rounding is None or beyond is None:
        return
    most = max(FLOAT32_RMS, part * rounding)
    if not beyond <= most:
        yield (
            f"it is not the trained model with this form's rounding: {what} are {beyond:.2g}{unit} from that (root "
            f"mean square), and {most:.2g} is the most; rounding alone makes {rounding:.2g}"
        )


def not_kept(kept: Estimate | None) -> Iterator[str]:
    if kept is not None and not (_ends(kept)[1] >= KEPT[0] and _ends(kept)[0] <= KEPT[1]):
        yield f"it holds {_told(kept, digits=2)} times what training changed, and {KEPT[0]} to {KEPT[1]} is allowed"


def not_tokenized(num_different: int, *, of: int) -> Iterator[str]:
    if num_different:
        yield f"its tokenizer splits {num_different} of {of} lines into other tokens"


def with_ends(name: str, found: Estimate | None) -> dict[str, Any]:
    """Return the three fields of `Parity` that hold a value and its interval."""
    value, low, high = (None, None, None) if found is None else (found.value, found.low, found.high)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def _ends(found: Estimate) -> tuple[float, float]:
    """Return the ends of the interval; of one document, which has none, the value twice."""
    return (
        found.value if found.low is None else found.low,
        found.value if found.high is None else found.high,
    )


def _told(found: Estimate, *, digits: int) -> str:
    """Return the value with its interval for a sentence."""
    low, high = _ends(found)
    interval = "" if found.low is None else f" (95 %: {low:.{digits}f} to {high:.{digits}f})"
    return f"{found.value:.{digits}f}{interval}"


def rms(found: Sequence[DocumentSums], name: str) -> float | None:
    """Return the root mean square over tokens of the documents that have it."""
    known = [(value, sums.tokens) for sums in found if (value := getattr(sums, name)) is not None]
    total, tokens = (sum(column) for column in zip(*known, strict=True)) if known else (0.0, 0)
    return math.sqrt(total / tokens) if tokens else None


def kept_of(found: Sequence[DocumentSums]) -> Estimate | None:
    """Return the part of training's effect that the export holds; None where there is no effect in float32."""
    effect = rms(found, "effect")
    if effect is None or effect < FLOAT32_RMS:
        return None
    sums_D2 = np.array([(sums.along, sums.effect) for sums in found if sums.effect is not None], dtype=np.float64)
    drawn_R2 = resampled_sums(sums_D2, num_resamples=NUM_RESAMPLES, generator=np.random.default_rng(0))
    along, whole = sums_D2.sum(0)
    return estimate(along / whole, drawn_R2[:, 0] / drawn_R2[:, 1], confidence=0.95, num_documents=len(sums_D2))


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
