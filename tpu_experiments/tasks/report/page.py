"""Build the page of a report from the runs, for pages/report.html."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from markupsafe import Markup

from tpu_experiments.config.objectives import OBJECTIVES
from tpu_experiments.pages.page import page
from tpu_experiments.tasks.report import tables
from tpu_experiments.tasks.report.charts import COLOURS, Line, line_chart, smoothed
from tpu_experiments.tasks.report.runs import SPEED_WINDOW, Curve, Run


@dataclass(frozen=True)
class Chart:
    """One chart of the page: its texts, number format and curve."""

    title: str
    caption: str
    form: str
    curve: Callable[[Run], Curve]
    is_smoothed: bool = False


def _measured() -> Iterator[Chart]:
    """Yield charts of each measure that an objective ranks its runs by."""
    for name in dict.fromkeys(kind.ranked_by for kind in OBJECTIVES.values() if kind.ranked_by is not None):
        for title, prefix, is_smoothed in ((f"Training {name}", "train", True), (f"Held-out {name}", "eval", False)):
            key = f"{prefix}/{name}"
            yield Chart(title, "Runs are ranked by it.", ".4f", partial(Run.curve, key=key), is_smoothed=is_smoothed)


CHARTS = (
    Chart(
        "Training loss",
        "Nats per token; of a long run a running mean, its records faint.",
        ".4f",
        lambda run: run.curve("train/loss"),
        is_smoothed=True,
    ),
    Chart("Held-out loss", "Nats per token on held-out rows.", ".4f", lambda run: run.curve("eval/loss")),
    *_measured(),
    Chart("Learning rate", "At each log record.", ".3g", lambda run: run.curve("train/lr")),
    Chart("Speed", f"Tokens per second over {SPEED_WINDOW} log records.", ",.0f", lambda run: run.speed()),
)


def report_page(runs: Sequence[Run], *, baseline: Run, title: str) -> str:
    """Return the HTML of all runs; `baseline` is one of them."""
    samples = [(i, run, texts) for i, run in enumerate(runs) if (texts := tables.samples(run))]
    return page(
        "report.html",
        title=title,
        about=_about(runs, baseline=baseline),
        colours=COLOURS,
        runs=runs,
        tiles=_tiles(runs),
        charts=list(_charts(runs)),
        results=_results(runs, baseline=baseline),
        differences=tables.differences(runs),
        time=_time(runs),
        samples=samples,
        prompts=list({str(run.config.get("sample.prompt")) for _, run, _ in samples}),
    )


def _about(runs: Sequence[Run], *, baseline: Run) -> str:
    open_runs = sum(run.result is None for run in runs)
    sentence = "One run" if len(runs) == 1 else f"{len(runs)} runs"
    sentence += f", {open_runs} of them not finished" if open_runs else ""
    compared = f"; compared with {baseline.label}" if len(runs) > 1 else ""
    return f"{sentence}{compared}. Made {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}."


def _tiles(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """Return name, value and note of each tile."""
    tiles = []
    finished = [run for run in runs if run.result is not None]
    losses = [(loss, run) for run in finished if (loss := run.value("eval_loss")) is not None]
    if losses and not tables.is_comparable(finished):
        tiles.append(("Held-out loss", "not ranked", "the runs were evaluated on different sources or tokens"))
    elif losses:
        loss, run = min(losses, key=lambda pair: pair[1].rank)
        before = run.value("eval_loss_before")
        what, value, origin = "loss", loss, f", from {before:.4f}" if before else ""
        if run.measure is not None:
            (what, value), origin = run.measure, ""
        tiles.append((f"Best held-out {what}", f"{value:.4f}", run.label + origin))
        if len(losses) > 1 and run.measure is None:
            worst = max(loss for loss, _ in losses)
            tiles.append(("Between best and worst", f"{worst - loss:.4f}", "nats per token of held-out text"))
    speeds = [(speed, run) for run in finished if (speed := run.value("tokens_per_second"))]
    if speeds:
        speed, run = max(speeds, key=lambda pair: pair[0])
        tiles.append(("Fastest", f"{speed:,.0f}", f"tokens per second, {run.label}"))
    seconds = sum((run.account or {}).get("wall_seconds", 0.0) for run in runs)
    tiles.append(("Time of all runs", f"{seconds / 3600:.2f} h", f"{seconds:,.0f} seconds on their machines"))
    dollars = [usd["on_demand"] for run in runs if (usd := (run.account or {}).get("usd")) and usd["on_demand"]]
    if dollars:
        tiles.append(("Cost of all runs", f"${sum(dollars):,.2f}", "on demand, at the prices of conf/hw"))
    return tiles


def _charts(runs: Sequence[Run]) -> Any:
    """Yield (chart, SVG) of every chart that has a point."""
    borders = tables.stage_borders(runs)
    for chart in CHARTS:
        raw = [Line(i, run.label, chart.curve(run)) for i, run in enumerate(runs)]
        lines = (
            [replace(line, points=smoothed(line.points, borders=borders)) for line in raw] if chart.is_smoothed else raw
        )
        if any(line.points for line in lines):
            behind = raw if lines != raw else []
            svg = line_chart(lines, title=chart.title, form=chart.form, borders=borders, behind=behind)
            yield chart, Markup(svg)


def _results(runs: Sequence[Run], *, baseline: Run) -> dict[str, Any]:
    titles, lines = tables.results(runs, baseline=baseline)
    note = ""
    if len(runs) > 1:
        note = f"Small figures: against {baseline.label}. The best of the finished runs is marked."
    if not tables.is_comparable([run for run in runs if run.result is not None]):
        note += " Held-out figures are not ranked: the runs were evaluated on different sources or tokens."
    return {"titles": titles, "lines": lines, "note": note}


def _time(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the seconds of each part of every run; `most` is the longest wall time."""
    parts = [tables.time_parts(run) for run in runs]
    most = max(((run.account or {}).get("wall_seconds", 0.0) for run in runs), default=0.0)
    names = list(dict.fromkeys(name for each in parts for name, _ in each))
    return {"most": most, "parts": parts, "names": names}
