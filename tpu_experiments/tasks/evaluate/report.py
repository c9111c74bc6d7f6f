"""Format the results of task=evaluate: a table for the terminal and the fields of test_results.json."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from tpu_experiments.metrics.bootstrap import Estimate
from tpu_experiments.metrics.held_out import (
    BOUNDS,
    MEASURES,
    SCORES,
    Comparison,
    LabelComparison,
    MeasureComparison,
)
from tpu_experiments.objectives.base import objective_class
from tpu_experiments.pages.table import aligned
from tpu_experiments.tasks.evaluate.subject import Subject, task_of

Compared = Mapping[str, Comparison]
ByValue = Mapping[str, Mapping[str, Comparison]]
"""Source to value of `task.by` to what is known of its documents."""
ComparedLabels = Mapping[str, LabelComparison]
"""Source to what a classifier says of its texts; empty for other models."""
Answers = Mapping[str, Mapping[str, Any]]
Further = Mapping[str, Mapping[str, MeasureComparison]]
"""Name of a measure of `FURTHER` to source to what is known of its documents."""


@dataclass(frozen=True)
class Results:
    """What is known of the held-out documents, of the base and of the trained model."""

    sources: Compared
    answers: Answers
    by_value: ByValue
    labels: ComparedLabels
    further: Further


def facts(subject: Subject, results: Results, *, num_in_split: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields of test_results.json.

    `loss`, `perplexity`, ... at the top level are the evaluated model's own, over all sources.
    """
    task = task_of(subject.config)
    last = list(results.sources.values())[-1]
    values = last.base if last.trained is None else last.trained
    return {
        "split": task.split,
        "evaluated": subject.kind,
        "place": subject.place or None,
        "model": subject.config.model.name,
        "objective": subject.config.objective.name,
        **{
            name: values[name].value for name in dict.fromkeys((*MEASURES, *BOUNDS.values(), *values)) if name in values
        },
        **_macro_f1(results.labels),
        "sources": {name: asdict(comparison) for name, comparison in results.sources.items()},
        **({"labels": {name: asdict(each) for name, each in results.labels.items()}} if results.labels else {}),
        **{name: {source: asdict(each) for source, each in own.items()} for name, own in results.further.items()},
        "by": task.by,
        "values": {
            name: {value: asdict(comparison) for value, comparison in values.items()}
            for name, values in results.by_value.items()
        },
        "documents_are": _counted(subject),
        "documents_in_split": dict(num_in_split),
        "answers": {name: _plain(scores) for name, scores in results.answers.items()},
        "resamples": task.resamples,
        "confidence": task.confidence,
        "seed": subject.config.seed,
    }


def as_text(subject: Subject, results: Results) -> str:
    """Return the tables and the path of the results."""
    task, found, labels, answers = task_of(subject.config), results.sources, results.labels, results.answers
    base = "base model" if subject.config.model.linear != "lr_qat" else "rounded base model"
    base = base if subject.start is None else "the model that it started from"
    what = {"base": f"the {base} alone", "checkpoint": f"{base} -> newest checkpoint"}
    title = f"{task.split} split, {what.get(subject.kind, f'{base} -> {subject.kind}')}"
    by_value = results.by_value.items()
    each = {f"{name}, {value}": estimates for name, values in by_value for value, estimates in values.items()}
    columns = objective_class(subject.config).columns_of_evaluation
    shown = partial(measures_table, columns=columns, counted=_counted(subject)) if columns else table
    by = [shown(each, first=f"by {task.by}")] if each else []
    own = [labels_table(found, labels), f1_table(labels)] if labels else [shown(found)]
    others = [_FURTHER_TABLES[name](values) for name, values in results.further.items() if values]
    tables = [title, *own, *others, *by, *([answers_table(answers)] if answers else [])]
    words = objective_class(subject.config).words_of_evaluation
    tables += [words] if words else []
    return "\n".join([*tables, f"[...]: {100 * task.confidence:g} % of {task.resamples} resamples", subject.results])


def table(found: Compared, *, first: str = "source") -> str:
    """Return a table with a line for every source; `base -> trained` where both exist."""
    is_bound = any(name in comparison.base for comparison in found.values() for name in BOUNDS.values())
    mark = " <=" if is_bound else ""
    header = (
        first, "documents", "tokens", "loss", "difference", f"perplexity{mark}", f"bits per byte{mark}", "accuracy"
    )  # fmt: skip
    return aligned([header, *(_line(name, comparison, is_bound=is_bound) for name, comparison in found.items())])


def _counted(subject: Subject) -> str:
    """Return what is drawn for an interval: pairs, single answers with those of their row, or documents."""
    objective = subject.config.objective
    return {"pairs": "pairs", "answers": "rows of answers"}.get(objective.predicts, "documents")


def measures_table(
    found: Compared, *, columns: Sequence[tuple[str, str]], counted: str = "documents", first: str = "source"
) -> str:
    """Return a table of an objective's own measures, the first two with their difference.

    Args:
        counted: title of the number of documents.
    """
    compared = [name for name, _ in columns[:2]]
    shown = [(name, title) for name, title in columns if any(name in own.base for own in found.values())]
    header = [first, counted, "tokens"]
    for name, title in shown:
        header += [title, "difference"] if name in compared else [title]
    lines = [tuple(header)]
    for source, own in found.items():
        cells = [source, f"{own.num_documents:,}", f"{own.num_tokens:,}"]
        for name, _ in shown:
            cells += _both_with_interval(own, name)
            if name in compared:
                cells.append("-" if own.difference is None else _with_interval(own.difference[name]))
        lines.append(tuple(cells))
    return aligned(lines)


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


def baselines_table(found: Mapping[str, MeasureComparison]) -> str:
    """Return the accuracy of masked tokens beside that of guesses from counts, a line for every source."""
    lines: list[tuple[str, ...]] = [("source", "masked tokens", "unigram", "bigram", "accuracy", "above bigram")]
    for name, own in found.items():
        counts = (_with_interval(own.base[guess], "{:.4f}") for guess in ("unigram", "bigram"))
        lines.append((name, f"{own.num_tokens:,}", *counts, *_both_with_interval(own, "accuracy", "above_bigram")))
    return aligned(lines)


def pseudo_table(found: Mapping[str, MeasureComparison]) -> str:
    """Return pseudo-perplexities, a line for every source."""
    lines: list[tuple[str, ...]] = [("source", "documents", "masked in turn", "pseudo-perplexity")]
    for name, own in found.items():
        shown = _both_with_interval(own, "pseudo_perplexity", form="{:.3f}")
        lines.append((name, f"{own.num_documents:,}", f"{own.num_tokens:,}", *shown))
    return aligned(lines)


def detection_table(found: Mapping[str, MeasureComparison]) -> str:
    """Return how a discriminator finds replaced tokens, a line for every source."""
    names = ("majority", "accuracy", "precision", "recall", "f1")
    lines: list[tuple[str, ...]] = [("source", "tokens", *names[:-1], "F1")]
    for name, own in found.items():
        lines.append((name, f"{own.num_tokens:,}", *_both_with_interval(own, *names)))
    return aligned(lines)


_FURTHER_TABLES = {
    "baselines": baselines_table,
    "pseudo_perplexity": pseudo_table,
    "detection": detection_table,
}


def _both_with_interval(found: MeasureComparison | Comparison, *measures: str, form: str | None = None) -> list[str]:
    """Return `base -> trained` of each measure, with the interval of the latter."""
    sides = [found.base] if found.trained is None else [found.base, found.trained]
    texts = []
    for name in measures:
        known = [side[name] for side in sides if name in side]
        shape = form or ("{:+.4f}" if name.startswith("above") else "{:.4f}")
        shown = [shape.format(each.value) for each in known[:-1]]
        shown += [_with_interval(each, shape) for each in known[-1:]]
        texts.append(" -> ".join(shown) or "-")
    return texts


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


def _with_interval(found: Estimate, form: str = "{:+.4f}") -> str:
    if found.low is None or found.high is None:
        return form.format(found.value)
    return f"{form.format(found.value)} [{form.format(found.low)}, {form.format(found.high)}]"
