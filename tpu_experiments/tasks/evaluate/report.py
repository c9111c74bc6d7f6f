"""Format the results of task=evaluate: a table for the terminal and the fields of test_results.json."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tpu_experiments.metrics.bootstrap import Estimate
from tpu_experiments.metrics.held_out import BOUNDS, MEASURES, SCORES, Comparison, LabelComparison
from tpu_experiments.objectives.base import has_bound, has_perplexity, is_causal
from tpu_experiments.pages.table import aligned
from tpu_experiments.tasks.evaluate.subject import Subject, task_of

Compared = Mapping[str, Comparison]
ByValue = Mapping[str, Mapping[str, Comparison]]
"""Source to value of `task.by` to what is known of its documents."""
ComparedLabels = Mapping[str, LabelComparison]
"""Source to what a classifier says of its texts; empty for other models."""
Answers = Mapping[str, Mapping[str, Any]]


def facts(
    subject: Subject,
    found: Compared,
    answers: Answers,
    *,
    by_value: ByValue,
    num_in_split: Mapping[str, int],
    labels: ComparedLabels,
) -> dict[str, Any]:
    """Return the fields of test_results.json.

    `loss`, `perplexity`, ... at the top level are the evaluated model's own, over all sources.
    """
    task = task_of(subject.config)
    last = list(found.values())[-1]
    values = last.base if last.trained is None else last.trained
    return {
        "split": task.split,
        "evaluated": subject.kind,
        "place": subject.place or None,
        "model": subject.config.model.name,
        "objective": subject.config.objective.name,
        **{name: values[name].value for name in (*MEASURES, *BOUNDS.values()) if name in values},
        **_macro_f1(labels),
        "sources": {name: asdict(comparison) for name, comparison in found.items()},
        **({"labels": {name: asdict(comparison) for name, comparison in labels.items()}} if labels else {}),
        "by": task.by,
        "values": {
            name: {value: asdict(comparison) for value, comparison in values.items()}
            for name, values in by_value.items()
        },
        "documents_in_split": dict(num_in_split),
        "answers": {name: _plain(scores) for name, scores in answers.items()},
        "resamples": task.resamples,
        "confidence": task.confidence,
        "seed": subject.config.seed,
    }


def as_text(subject: Subject, found: Compared, answers: Answers, *, by_value: ByValue, labels: ComparedLabels) -> str:
    """Return the tables and the path of the results."""
    task = task_of(subject.config)
    what = {"base": "the base model alone", "checkpoint": "base model -> newest checkpoint"}
    title = f"{task.split} split, {what.get(subject.kind, f'base model -> {subject.kind}')}"
    each = {f"{name}, {value}": estimates for name, values in by_value.items() for value, estimates in values.items()}
    by = [table(each, first=f"by {task.by}")] if each else []
    own = [labels_table(found, labels), f1_table(labels)] if labels else [table(found)]
    tables = [title, *own, *by, *([answers_table(answers)] if answers else [])]
    if labels:
        tables.append("majority: the accuracy of giving every text the most frequent label")
    elif has_bound(subject.config):
        tables.append(
            "loss: an upper bound of -log p in nats per token, estimated with one draw of masks for each document; "
            "accuracy: of masked tokens, at a number of them that is uniform in 1 to all"
        )
    elif not has_perplexity(subject.config):
        tables.append(
            "loss and accuracy are the discriminator's, of every token but a document's first; the rate of replaced "
            "tokens and F1 are in the run's result.json (eval_measures)"
        )
    elif not is_causal(subject.config):
        tables.append("loss, perplexity and accuracy are of masked tokens, given the others on both sides")
    return "\n".join([*tables, f"[...]: {100 * task.confidence:g} % of {task.resamples} resamples", subject.results])


def table(found: Compared, *, first: str = "source") -> str:
    """Return a table with a line for every source; `base -> trained` where both exist."""
    is_bound = any(name in comparison.base for comparison in found.values() for name in BOUNDS.values())
    mark = " <=" if is_bound else ""
    header = (
        first, "documents", "tokens", "loss", "difference", f"perplexity{mark}", f"bits per byte{mark}", "accuracy"
    )  # fmt: skip
    return aligned([header, *(_line(name, comparison, is_bound=is_bound) for name, comparison in found.items())])


def labels_table(found: Compared, labels: ComparedLabels) -> str:
    """Return a classifier's measures, a line for every source."""
    lines: list[tuple[str, ...]] = [
        ("source", "texts", "loss", "majority", "accuracy", "difference", "macro F1", "difference")
    ]
    for name, own in labels.items():
        trained, difference = own.trained or {}, own.difference or {}
        pairs = []
        for measure in ("accuracy", "macro_f1"):
            pairs.append(_pair(own.base.get(measure), trained.get(measure), "{:.4f}"))
            pairs.append(_with_interval(difference[measure]) if measure in difference else "-")
        loss = _pair(found[name].base.get("loss"), (found[name].trained or {}).get("loss"), "{:.4f}")
        lines.append((name, f"{own.num_texts:,}", loss, f"{own.majority:.4f}", *pairs))
    return aligned(lines)


def f1_table(labels: ComparedLabels) -> str:
    """Return the F1 of every label over all sources."""
    whole = list(labels.values())[-1]
    lines: list[tuple[str, ...]] = [("label", "texts", "F1")]
    for label, count in whole.labelled.items():
        scores = [side[label] for side in whole.f1.values()]
        lines.append((label, f"{count:,}", " -> ".join("-" if s is None else f"{s:.4f}" for s in scores)))
    return aligned(lines)


def _macro_f1(labels: ComparedLabels) -> dict[str, float]:
    """Return the evaluated model's macro F1 over all sources and the majority rate; empty for other models."""
    if not labels:
        return {}
    whole = list(labels.values())[-1]
    values = whole.base if whole.trained is None else whole.trained
    return {"macro_f1": values["macro_f1"].value, "majority": whole.majority}


def answers_table(answers: Answers) -> str:
    """Return a table with a line for every source with answered conversations."""
    lines: list[tuple[str, ...]] = [("answers of", "number", *SCORES)]
    for name, scores in answers.items():
        trained = scores.get("trained", {})
        estimates = (_pair(scores["base"][kind], trained.get(kind), "{:.3f}") for kind in SCORES)
        lines.append((name, str(scores["answers"]), *estimates))
    return aligned(lines)


def _plain(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return estimates as dicts."""
    sides = {side: {k: asdict(e) for k, e in values.items()} for side, values in scores.items() if side != "answers"}
    return {"answers": scores["answers"], **sides}


def _line(name: str, found: Comparison, *, is_bound: bool) -> tuple[str, ...]:
    """Return a source's line; of bounds, with the interval of the last perplexity."""

    def both(measure: str, form: str) -> str:
        key = BOUNDS.get(measure, measure) if is_bound else measure
        trained = None if found.trained is None else found.trained.get(key)
        shown = _pair(found.base.get(key), trained, form)
        last = found.base.get(key) if trained is None else trained
        if measure != "perplexity" or not is_bound or last is None or last.low is None or last.high is None:
            return shown
        return f"{shown} [{form.format(last.low)}, {form.format(last.high)}]"

    difference = "-" if found.difference is None else _with_interval(found.difference["loss"])
    return (
        name,
        f"{found.num_documents:,}",
        f"{found.num_tokens:,}",
        both("loss", "{:.4f}"),
        difference,
        both("perplexity", "{:.2f}"),
        both("bits_per_byte", "{:.4f}"),
        both("accuracy", "{:.4f}"),
    )


def _pair(base: Estimate | None, trained: Estimate | None, form: str) -> str:
    estimates = [form.format(each.value) for each in (base, trained) if each is not None]
    return " -> ".join(estimates) or "-"


def _with_interval(found: Estimate) -> str:
    if found.low is None:
        return f"{found.value:+.4f}"
    return f"{found.value:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
