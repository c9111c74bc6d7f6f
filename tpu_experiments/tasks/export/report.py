"""The comparisons as parity.json, parity.md and the table that the command prints."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tpu_experiments.config.escaping import for_markdown
from tpu_experiments.pages.table import aligned, markdown_line
from tpu_experiments.storage import strict_json
from tpu_experiments.tasks.export.parity import Parity

COLUMNS = (
    "form",
    "verdict",
    "perplexity",
    "ratio",
    "kept",
    "rounding",
    "beyond",
    "KL",
    "log-prob.",
    "greedy",
    "lines",
    "read by",
)


OF_SCORES = ("form", "verdict", "score", "kept", "rounding", "beyond", "difference", "lines", "read by")
"""Columns of a model that scores texts."""


def columns_of(parities: Iterable[Parity]) -> tuple[str, ...]:
    """Return the titles of the columns."""
    return COLUMNS if all(parity.mean_score is None for parity in parities) else OF_SCORES


def row_of(parity: Parity, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the cells of `columns_of`."""
    if parity.mean_score is not None:
        return (
            parity.form,
            parity.verdict,
            f"{parity.export_mean_score:.4f}",
            "" if parity.kept is None else f"{parity.kept:.4f}",
            *("" if value is None else f"{value:.1e}" for value in (parity.rounding, parity.beyond_rounding)),
            f"{parity.max_score_diff:.2e}",
            f"{parity.lines - parity.different_lines}/{parity.lines}",
            parity.reader,
        )
    if parity.perplexity_ratio is None:
        return (parity.form, parity.verdict, *[""] * (len(columns) - 2))
    return (
        parity.form,
        parity.verdict,
        f"{parity.export_perplexity:.4f}",
        f"{parity.perplexity_ratio:.6f}",
        "" if parity.kept is None else f"{parity.kept:.4f}",
        *("" if value is None else f"{value:.1e}" for value in (parity.rounding, parity.beyond_rounding)),
        f"{max(0.0, parity.mean_kl or 0.0):.2e}",
        f"{parity.max_log_prob_diff:.2e}",
        f"{parity.same_greedy}/{parity.greedy}",
        f"{parity.lines - parity.different_lines}/{parity.lines}",
        parity.reader,
    )


def _interval(parities: Sequence[Parity]) -> str:
    """Return a sentence with the intervals of the ratios; empty where no form has any."""
    known = [p for p in parities if p.perplexity_ratio_low is not None and p.perplexity_ratio_high is not None]
    shown = ", ".join(f"{p.form} {p.perplexity_ratio_low:.6f} to {p.perplexity_ratio_high:.6f}" for p in known)
    return f" 95 % intervals of `ratio` over documents: {shown}." if known else ""


def as_table(found: Mapping[str, Sequence[Parity]]) -> str:
    """Return what the command prints: a row for each copy of the model, and the folders."""
    every = [parity for parities in found.values() for parity in parities]
    columns = columns_of(every)
    lines = [aligned([columns, *(row_of(parity, columns) for parity in every)])]
    lines += [line for parities in found.values() if (line := _interval(parities).strip())]
    lines += [f"{p.form}: {p.reason}" for p in every if p.reason]
    return "\n".join([*lines, *found])


def as_json(parities: Sequence[Parity]) -> str:
    """Return the content of parity.json."""
    return strict_json.dumps([parity.fields() for parity in parities], indent=1) + "\n"


def as_markdown(parities: Sequence[Parity], *, files: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the content of parity.md.

    Args:
        files: `bytes` and `sha256` of each file, by name.
    """
    first, columns = parities[0], columns_of(parities)
    lines = [
        "# Parity with the trained model",
        "",
        markdown_line(columns),
        markdown_line(["---"] * len(columns)),
        *(markdown_line([for_markdown(cell) for cell in row_of(parity, columns)]) for parity in parities),
        "",
        *(f"* {parity.form}: {for_markdown(parity.reason)}." for parity in parities if parity.reason),
        *[""][: any(parity.reason for parity in parities)],
    ]
    if first.perplexity is not None:
        lines += [
            f"Compared in {first.arithmetic} on {first.tokens:,} tokens of {first.documents} "
            f"{for_markdown(first.data)}, of which the trained model's perplexity is {first.perplexity:.4f}. `ratio`: "
            "perplexity of the files over that of the trained model. `kept`: part of training's effect that the files "
            "hold, 1 for all. `rounding`: "
            "what the form's own rounding does to the trained model, root mean square difference of log-probabilities, "
            "nats; `beyond`: that of the files from the trained model so rounded. `KL`: mean divergence of the next "
            "token's distribution, nats. `log-prob.`: largest difference of a log-probability, over the whole "
            "vocabulary. `greedy`: tokens of continuations that are equal before the first that differs. `lines`: "
            "lines of text that both tokenizers split alike."
            f"{_interval(parities)}",
            "",
        ]
    if first.mean_score is not None:
        lines += [
            f"Compared in {first.arithmetic} on {first.documents} whole {for_markdown(first.data)}, to which the "
            f"trained model gives a mean score of {first.mean_score:.4f}. `score`: that of the files. `kept`: part of "
            "training's effect that the files hold, 1 for all. `rounding`: what the form's own rounding does to the "
            "trained model's scores, root mean square; `beyond`: difference of the files' scores from those. "
            "`difference`: largest of a score from the trained model's. `lines`: lines of text that both tokenizers "
            "split alike.",
            "",
        ]
    lines += ["| file | bytes | SHA-256 |", "| --- | --- | --- |"]
    lines += [
        markdown_line([for_markdown(name), f"{f['bytes']:,}", f"`{f['sha256']}`"]) for name, f in sorted(files.items())
    ]
    return "\n".join(lines) + "\n"
