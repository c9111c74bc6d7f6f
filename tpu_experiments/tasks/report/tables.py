"""Tables of a report: config differences, results, and where the time went."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tpu_experiments.metrics.goodput import PARTS
from tpu_experiments.tasks.report.runs import Run

NOT_COMPARED = ("name", "output_dir")
MAX_CHARACTERS = 60
PARTS_BY_NAME = re.compile(r"(data|logger|callbacks|curriculum\.stages)\.[^.]+(?=\.)")


@dataclass(frozen=True)
class Figure:
    """One column of the results table."""

    title: str
    value: Callable[[Run], float | None]
    form: str
    best: Callable[[Sequence[float]], float] | None = None
    """min or max; None where neither is better."""


def _account(name: str) -> Callable[[Run], float | None]:
    return lambda run: (run.account or {}).get(name)


def _usd(kind: str) -> Callable[[Run], float | None]:
    return lambda run: ((run.account or {}).get("usd") or {}).get(kind)


def _of(name: str) -> Callable[[Run], float | None]:
    return lambda run: run.value(name)


def _measure(name: str) -> Callable[[Run], float | None]:
    return lambda run: ((run.result or {}).get("eval_measures") or {}).get(name)


def _test(name: str) -> Callable[[Run], float | None]:
    return lambda run: (run.test or {}).get(name)


def _benchmark(name: str) -> Callable[[Run], float | None]:
    return lambda run: run.benchmarks.get(name, {}).get("value")


RANKED_BY = "ranked by"
FIGURES = (
    Figure(RANKED_BY, lambda run: None if run.measure is None else run.measure[1], ",.4f", best=max),
    Figure("held-out loss before", _of("eval_loss_before"), ",.4f"),
    Figure("held-out loss", _of("eval_loss"), ",.4f", best=min),
    Figure("perplexity", _of("perplexity"), ",.2f", best=min),
    Figure("bits per byte", _measure("bits_per_byte"), ",.4f", best=min),
    Figure("accuracy", _measure("accuracy"), ",.4f", best=max),
    Figure("test loss", _test("loss"), ",.4f", best=min),
    Figure("test bits per byte", _test("bits_per_byte"), ",.4f", best=min),
    Figure("tokens", _of("tokens"), ",.0f"),
    Figure("tokens/s", lambda run: run.value("tokens_per_second") or None, ",.0f", best=max),
    Figure("trainable", _of("num_trainable"), ",.0f"),
    Figure("wall seconds", _account("wall_seconds"), ",.1f", best=min),
    Figure("$ on demand", _usd("on_demand"), ",.2f", best=min),
    Figure("$ spot", _usd("spot"), ",.2f", best=min),
    Figure("lives", _account("lives"), ",.0f"),
    Figure("programs", _of("num_compiles"), ",.0f"),
    Figure("after warm-up", _of("compiles_after_warmup"), ",.0f"),
    Figure("host GiB", _of("peak_host_rss_gib"), ",.2f"),
    Figure("device GiB", _of("peak_device_memory_gib"), ",.2f"),
)
OF_HELD_OUT = (RANKED_BY, "held-out loss", "perplexity", "bits per byte", "accuracy", "test loss", "test bits per byte")
"""Figures that are comparable only between runs evaluated on the same tokens of the same text."""
RELATIVE = ("held-out loss", "tokens/s", "wall seconds")
"""Figures that are also shown relative to the baseline."""


@dataclass(frozen=True)
class Cell:
    """Figure as text, with its value relative to the baseline or its interval as a note."""

    text: str
    note: str = ""
    is_best: bool = False


def results(runs: Sequence[Run], *, baseline: Run) -> tuple[list[str], list[list[Cell]]]:
    """Return titles, and one line per run: its status and every figure known for any run."""
    benchmarks = dict.fromkeys(name for run in runs for name in run.benchmarks)
    figures = (*FIGURES, *(Figure(name, _benchmark(name), ",.4f") for name in benchmarks))
    shown = [figure for figure in figures if any(figure.value(run) is not None for run in runs)]
    finished = [run for run in runs if run.result is not None]
    best = {}
    leading = tied(finished)
    for figure in shown:
        among = leading if figure.title == "held-out loss" else finished
        values = [value for run in among if (value := figure.value(run)) is not None]
        is_ranked = figure.title not in OF_HELD_OUT or is_comparable(finished)
        if figure.best is not None and len(set(values)) > 1 and is_ranked:
            best[figure.title] = figure.best(values)
    lines = []
    for run in runs:
        line = [Cell(run.status)]
        for figure in shown:
            value = figure.value(run)
            is_beside = figure.title not in OF_HELD_OUT or is_comparable([run, baseline])
            beside = relative(figure, value, figure.value(baseline)) if run is not baseline and is_beside else ""
            beside = interval(run) if figure.title == "test loss" else beside
            beside = bounds(run.benchmarks[figure.title]) if figure.title in run.benchmarks else beside
            is_best = run.result is not None and value is not None and best.get(figure.title) == value
            is_best = is_best and (figure.title != "held-out loss" or run in leading)
            line.append(Cell("" if value is None else format(value, figure.form), beside, is_best))
        lines.append(line)
    names = " or ".join(dict.fromkeys(run.measure[0] for run in runs if run.measure is not None))
    return ["status", *(names if figure.title == RANKED_BY else figure.title for figure in shown)], lines


def tied(runs: Sequence[Run]) -> list[Run]:
    """Return the runs whose measure is the best; all where they are ranked by their loss alone."""
    first = min((run.rank[0] for run in runs), default=0.0)
    return [run for run in runs if run.rank[0] == first]


def is_comparable(runs: Sequence[Run]) -> bool:
    """Return whether all known evaluations used the same sources and number of tokens."""
    return len({run.held_out for run in runs} - {None}) < 2


def relative(figure: Figure, value: float | None, other: float | None) -> str:
    """Return `-0.012` for a loss, `1.2x` for others; empty where not compared or unknown."""
    if figure.title not in RELATIVE or value is None or other is None:
        return ""
    if figure.title == "held-out loss":
        return f"{value - other:+.4f}"
    return f"{value / other:.2f}x" if other else ""


def interval(run: Run) -> str:
    """Return the confidence interval of the test loss over all sources, from task=evaluate."""
    sources = list(((run.test or {}).get("sources") or {}).values())
    return bounds(((sources[-1].get("trained") or sources[-1].get("base") or {}) if sources else {}).get("loss") or {})


def bounds(found: Mapping[str, float]) -> str:
    """Return a figure's interval; empty where there is none."""
    low, high = found.get("low"), found.get("high")
    return "" if low is None or high is None else f"{low:.4f} to {high:.4f}"


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the keys whose values differ between runs, with the values; `-` where a config lacks the key.

    A source, stage or logger that some runs lack is one line, and so is a model, whose name implies its shape.
    """
    configs = [_abbreviated(run.config, whole=_not_in_all(runs)) for run in runs]
    lines = []
    for key in dict.fromkeys(key for config in configs for key in config):
        values = [_shown(config[key]) if key in config else "-" for config in configs]
        if key not in NOT_COMPARED and len(set(values)) > 1:
            lines.append((key, values))
    return lines


def _not_in_all(runs: Sequence[Run]) -> set[str]:
    """Return the parts of `PARTS_BY_NAME` that some runs lack, and `model.arch` if the models differ."""
    found = [{part for key in run.config if (part := _part(key)) is not None} for run in runs]
    models = {str(run.config.get("model.name")) for run in runs}
    parts = {part for of_run in found for part in of_run if not all(part in other for other in found)}
    return parts | ({"model.arch"} if len(models) > 1 else set())


def _part(key: str) -> str | None:
    """Return `data.uk_law` for `data.uk_law.path`."""
    match = PARTS_BY_NAME.match(key)
    return match[0] if match else None


def _abbreviated(config: Mapping[str, object], *, whole: set[str]) -> dict[str, object]:
    """Return the config with one entry for each part of `whole`, and without a differing model's shape."""
    short: dict[str, object] = {}
    for key, value in config.items():
        part = _part(key)
        if part in whole:
            short[str(part)] = "yes"
        elif not any(key.startswith(f"{name}.") for name in ("model.arch", "model.tiny_arch") if "model.arch" in whole):
            short[key] = value
    return short


def time_parts(run: Run) -> list[tuple[str, float]]:
    """Return the wall seconds of each part, in the order of `PARTS`, without zeros."""
    seconds = (run.account or {}).get("seconds") or {}
    return [(part.replace("_", " "), seconds[part]) for part in PARTS if seconds.get(part)]


def samples(run: Run) -> list[tuple[str, str]]:
    """Return the samples before and after training, where there are any."""
    result = run.result or {}
    found = [("before", result.get("sample_before")), ("after", result.get("sample_after"))]
    return [(when, text) for when, text in found if text]


def stage_borders(runs: Sequence[Run]) -> list[int]:
    """Return the steps between stages, if they are the same in all finished runs."""
    found = set()
    for run in runs:
        ends, step = [], 0
        for stage in (run.result or {}).get("stages", []):
            step += stage["steps"]
            ends.append(step)
        if run.result is not None:
            found.add(tuple(ends[:-1]))
    return list(found.pop()) if len(found) == 1 else []


def _shown(value: object) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1]}…"
