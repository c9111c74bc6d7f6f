"""Figures of a run's losses and data, as PNG for TensorBoard's IMAGES tab.

matplotlib is imported when the first figure is drawn (1.2 s), which is at the end of a run.
"""

import io
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tpu_experiments.data.audit.findings import Manifest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 9.0, 4.0, 100
NUM_MEANS = 50
"""Points of the mean curve drawn over a training loss with more records than this."""

Record = Mapping[str, float]
"""Values logged after a step, with the step number under `step`."""


def loss_figure(records: Sequence[Record], *, stages: Mapping[str, int], title: str) -> "Figure":
    """Draw training and held-out losses by step, and beside them shares of right answers, if any.

    Args:
        records: log records in the order of their steps; those without a loss or share are ignored.
        stages: steps of each stage by name, in order; boundaries are dashed lines.
    """
    skills = sorted({name for record in records for name in record if name.startswith("skill/")})
    figure = _figure()
    columns = figure.subplots(1, 2 if skills else 1, squeeze=False)[0]
    _draw_losses(columns[0], records)
    if skills:
        for name in skills:
            steps, shares = _curve(records, name)
            columns[1].plot(steps, [100 * share for share in shares], "o-", label=name.removeprefix("skill/"))
        columns[1].set(ylabel="right answers, %", ylim=(-3, 103))
    for axes in columns:
        _draw_borders(axes, stages)
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def audit_figure(manifests: Sequence[Manifest]) -> "Figure":
    """Draw, for each source, the lengths of its training documents and what the tokens of its splits are."""
    figure = _figure(height=HEIGHT_INCHES * len(manifests))
    for (lengths, tokens), manifest in zip(figure.subplots(len(manifests), 2, squeeze=False), manifests, strict=True):
        _draw_lengths(lengths, manifest)
        _draw_tokens(tokens, manifest)
    return figure


def png_of(figure: "Figure") -> bytes:
    """Return the figure as a PNG file."""
    buffer: Any = io.BytesIO()
    figure.savefig(buffer, format="png")
    return bytes(buffer.getvalue())


def _draw_losses(axes: "Axes", records: Sequence[Record]) -> None:
    steps, losses = _curve(records, "train/loss")
    many = len(steps) > 2 * NUM_MEANS
    axes.plot(steps, losses, color="C0", linewidth=1.0, alpha=0.35 if many else 1.0, label="training")
    if many:
        cuts = [len(steps) * part // NUM_MEANS for part in range(NUM_MEANS + 1)]
        middles = [sum(steps[a:b]) / (b - a) for a, b in pairwise(cuts)]
        axes.plot(middles, [sum(losses[a:b]) / (b - a) for a, b in pairwise(cuts)], color="C0", label="its mean")
    sources = sorted({name for record in records for name in record if name.startswith("eval/loss_")})
    shown = {"eval/loss": "held out"} if len(sources) < 2 else {name: f"held out: {name[10:]}" for name in sources}
    for number, (name, label) in enumerate(shown.items(), start=1):
        axes.plot(*_curve(records, name), "o--", color=f"C{number}", markersize=4, linewidth=1.0, label=label)
    axes.set_ylabel("loss, nats per token")


def _draw_borders(axes: "Axes", stages: Mapping[str, int]) -> None:
    first = 0
    for name, steps in stages.items():
        if first:
            axes.axvline(first, color="gray", linewidth=0.8, linestyle="--")
        if len(stages) > 1:
            place = ("data", "axes fraction")
            axes.annotate(name, (first, 1.0), xycoords=place, xytext=(3, -10), textcoords="offset points", fontsize=8)
        first += steps


def _draw_lengths(axes: "Axes", manifest: Manifest) -> None:
    """Draw bins of doubling size at equal width, the last one open."""
    histogram = manifest["splits"].get("train", {}).get("length_histogram") or {"edges": [], "documents": []}
    counts, edges = histogram["documents"], histogram["edges"]
    filled = [place for place, count in enumerate(counts) if count]
    places = range(filled[0], filled[-1] + 1) if filled else range(0)
    bars = axes.bar(range(len(places)), [counts[place] for place in places], width=0.9)
    axes.bar_label(bars, fmt="{:,.0f}", fontsize=8)
    ends = [f"{edges[place + 1]:,}" if place + 1 < len(edges) else "more" for place in places]
    axes.set_xticks(range(len(places)), [f"to {end}" for end in ends], fontsize=8)
    axes.set_title(f"{manifest['source']}: training documents by their tokens", fontsize=10)
    axes.set_xlabel(f"tokens of a document; a row holds {manifest['seq_len']:,}")
    axes.margins(y=0.15)


def _draw_tokens(axes: "Axes", manifest: Manifest) -> None:
    splits = {name: split for name, split in manifest["splits"].items() if split["rows"]}
    left = [0.0] * len(splits)
    learnt = [split["supervised_tokens"] for split in splits.values()]
    read = [split["tokens"] - split["supervised_tokens"] for split in splits.values()]
    padding = [split["rows"] * manifest["seq_len"] - split["tokens"] for split in splits.values()]
    whole = [max(sum(parts), 1) for parts in zip(learnt, read, padding, strict=True)]
    for label, counts, color in (("learnt", learnt, "C2"), ("only read", read, "C0"), ("padding", padding, "0.8")):
        shares = [100 * count / total for count, total in zip(counts, whole, strict=True)]
        axes.barh(list(splits), shares, left=left, label=label, color=color)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    names = [f"{name}\n{split['documents']:,} documents\n{split['tokens']:,} tokens" for name, split in splits.items()]
    axes.set_yticks(range(len(splits)), names, fontsize=8)
    axes.set_title(f"{manifest['source']}: what its rows are filled with", fontsize=10)
    axes.set(xlabel="% of the places in rows", xlim=(0, 100))
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)


def _curve(records: Sequence[Record], name: str) -> tuple[list[float], list[float]]:
    found = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _figure(*, height: float = HEIGHT_INCHES) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_INCHES, height), dpi=DOTS_PER_INCH, layout="constrained")
