"""A report as one HTML file that needs nothing else."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from string import Template

from tpu_experiments.tasks.report import tables
from tpu_experiments.tasks.report.charts import COLOURS, Line, line_chart, smoothed
from tpu_experiments.tasks.report.runs import SPEED_WINDOW, Curve, Run


@dataclass(frozen=True)
class Chart:
    """One of the charts of a page."""

    title: str
    caption: str
    form: str
    curve: Callable[[Run], Curve]
    is_smoothed: bool = False


CHARTS = (
    Chart(
        "Training loss",
        "Nats per token; of a long run a running mean, its records faint.",
        ".4f",
        lambda run: run.curve("train/loss"),
        is_smoothed=True,
    ),
    Chart("Held-out loss", "Nats per token on held-out rows.", ".4f", lambda run: run.curve("eval/loss")),
    Chart("Learning rate", "At each log record.", ".3g", lambda run: run.curve("train/lr")),
    Chart("Speed", f"Tokens per second over {SPEED_WINDOW} log records.", ",.0f", lambda run: run.speed()),
)


def report_page(runs: Sequence[Run], *, baseline: Run, title: str) -> str:
    """HTML of all runs; `baseline` is one of them."""
    parts = [
        _header(runs, baseline=baseline, title=title),
        _tiles(runs),
        _legend(runs),
        _charts(runs),
        _results(runs, baseline=baseline),
        _differences(runs),
        _time(runs),
        _samples(runs),
        _folders(runs),
    ]
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.substitute(title=escape(title), body="\n".join(part for part in parts if part))


def _header(runs: Sequence[Run], *, baseline: Run, title: str) -> str:
    open_runs = sum(run.result is None for run in runs)
    said = "One run" if len(runs) == 1 else f"{len(runs)} runs"
    said += f", {open_runs} of them not finished" if open_runs else ""
    compared = f"; compared with {baseline.label}" if len(runs) > 1 else ""
    about = f"{said}{compared}. Made {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}."
    return f'<header><h1>{escape(title)}</h1><p class="about">{escape(about)}</p></header>'


def _tiles(runs: Sequence[Run]) -> str:
    tiles = []
    finished = [run for run in runs if run.result is not None]
    losses = [(loss, run) for run in finished if (loss := run.value("eval_loss")) is not None]
    if losses and not tables.is_comparable(finished):
        tiles.append(("Held-out loss", "not ranked", "the runs were evaluated on different sources or tokens"))
    elif losses:
        loss, run = min(losses, key=lambda pair: pair[0])
        before = run.value("eval_loss_before")
        tiles.append(("Best held-out loss", f"{loss:.4f}", run.label + (f", from {before:.4f}" if before else "")))
        if len(losses) > 1:
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
    cells = (
        f'<div class="tile"><span>{escape(name)}</span><b>{value}</b><small>{escape(note)}</small></div>'
        for name, value, note in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _legend(runs: Sequence[Run]) -> str:
    chips = (
        f'<button type="button" data-run="{i}" aria-pressed="true">{_swatch(i)}{escape(run.label)}</button>'
        for i, run in enumerate(runs)
    )
    return f'<nav class="legend" aria-label="Runs; press to hide or show">{"".join(chips)}</nav>'


def _swatch(index: int) -> str:
    dashed = " dashed" if index >= COLOURS else ""
    return f'<i class="swatch c{index % COLOURS}{dashed}"></i>'


def _charts(runs: Sequence[Run]) -> str:
    borders = tables.stage_borders(runs)
    figures = []
    for chart in CHARTS:
        raw = [Line(i, run.label, chart.curve(run)) for i, run in enumerate(runs)]
        lines = (
            [replace(line, points=smoothed(line.points, borders=borders)) for line in raw] if chart.is_smoothed else raw
        )
        if not any(line.points for line in lines):
            continue
        behind = raw if lines != raw else []
        svg = line_chart(lines, title=chart.title, form=chart.form, borders=borders, behind=behind)
        figures.append(f"<figure><h3>{chart.title}</h3>{svg}<figcaption>{chart.caption}</figcaption></figure>")
    if not figures:
        return '<p class="note">None of these runs has written metrics.jsonl.</p>'
    return f'<div class="charts">{"".join(figures)}</div>'


def _results(runs: Sequence[Run], *, baseline: Run) -> str:
    titles, lines = tables.results(runs, baseline=baseline)
    body = []
    for i, (run, line) in enumerate(zip(runs, lines, strict=True)):
        cells = "".join(
            f"<td{' class=best' if cell.is_best else ''}>{escape(cell.text)}"
            f"{f'<small>{escape(cell.note)}</small>' if cell.note else ''}</td>"
            for cell in line
        )
        body.append(f'<tr data-run="{i}"><th scope="row">{_swatch(i)}{escape(run.label)}</th>{cells}</tr>')
    note = ""
    if len(runs) > 1:
        note = f"Small figures: against {baseline.label}. The best of the finished runs is marked."
    if not tables.is_comparable([run for run in runs if run.result is not None]):
        note += " Held-out figures are not ranked: the runs were evaluated on different sources or tokens."
    return _section("What came out", note, _table(["run", *titles], body))


def _differences(runs: Sequence[Run]) -> str:
    if len(runs) < 2:
        return ""
    lines = tables.differences(runs)
    if not lines:
        return _section("What differs", "Nothing: all have the same config but for the name.", "")
    body = [
        f'<tr><th scope="row"><code>{escape(key)}</code></th>'
        f"{''.join(f'<td data-run={i}>{escape(value)}</td>' for i, value in enumerate(values))}</tr>"
        for key, values in lines
    ]
    head = ["key", *(run.label for run in runs)]
    return _section("What differs", "Keys of the config that are not the same in all runs.", _table(head, body))


def _time(runs: Sequence[Run]) -> str:
    most = max(((run.account or {}).get("wall_seconds", 0.0) for run in runs), default=0.0)
    if not most:
        return ""
    lines, names = [], dict[str, None]()
    for i, run in enumerate(runs):
        parts = tables.time_parts(run)
        names |= dict.fromkeys(name for name, _ in parts)
        bars = "".join(
            f'<span class="part {name.replace(" ", "-")}" style="width:{100 * seconds / most:.3f}%" '
            f'title="{name}: {seconds:,.1f} s"></span>'
            for name, seconds in parts
        )
        total = sum(seconds for _, seconds in parts)
        lines.append(
            f'<div class="bar" data-run="{i}"><span class="of">{escape(run.label)}</span>'
            f'<span class="track">{bars}</span><span class="sum">{total:,.1f} s</span></div>'
        )
    key = "".join(f'<span><i class="part {name.replace(" ", "-")}"></i>{name}</span>' for name in names)
    note = "Wall time over all lives of a run; the pointer on a part shows its seconds."
    return _section("Where the time went", note, f'<div class="key">{key}</div>{"".join(lines)}', kind="card")


def _samples(runs: Sequence[Run]) -> str:
    written = [(i, run, texts) for i, run in enumerate(runs) if (texts := tables.samples(run))]
    if not written:
        return ""
    prompts = {str(run.config.get("sample.prompt")) for _, run, _ in written}
    note = f"Prompt: {prompts.pop()}" if len(prompts) == 1 else "To the prompt of each run's config."
    body = "".join(
        f'<div data-run="{i}"><h3>{_swatch(i)}{escape(run.label)}</h3>'
        + "".join(f"<p><b>{when}</b> {escape(text)}</p>" for when, text in texts)
        + "</div>"
        for i, run, texts in written
    )
    return _section("What they write", note, body, kind="card samples")


def _folders(runs: Sequence[Run]) -> str:
    items = "".join(f"<li>{escape(run.label)}: <code>{escape(run.folder)}</code></li>" for run in runs)
    return f"<footer><details><summary>Run folders</summary><ul>{items}</ul></details></footer>"


def _table(head: Sequence[str], body: Iterable[str]) -> str:
    header = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    return f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _section(title: str, note: str, content: str, *, kind: str = "scroll") -> str:
    inside = f'<div class="{kind}">{content}</div>' if content else ""
    return f'<section><h2>{title}</h2><p class="note">{escape(note)}</p>{inside}</section>'
