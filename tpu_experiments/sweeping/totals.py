"""Sum the plans of a sweep's points: total hours and dollars before anything is rented."""

import json
from collections.abc import Sequence
from typing import Any

from tpu_experiments.storage import paths
from tpu_experiments.sweeping.points import Point

PAGE = "plan_total.md"
Cells = Sequence[str]


def plan_of(point: Point) -> dict[str, Any] | None:
    """Return the content of the point's plan.json, or None if there is none."""
    file = paths.join(point.config.output_dir, "plans", point.name, "plan.json")
    return json.loads(paths.read_text(file)) if paths.exists(file) else None


def total_table(points: Sequence[Point]) -> list[Cells]:
    """Return a line of titles, one per point, and the sums over the known figures; unknown ones are empty."""
    keys = list(dict.fromkeys(key for point in points for key in point.changed))
    figures: list[tuple[float | None, ...]] = []
    titles = [*(keys or ["point"]), *([] if "hw" in keys else ["hw"])]
    table: list[Cells] = [[*titles, "fits", "hours", "$ on demand", "$ spot"]]
    for point in points:
        plan = plan_of(point) or {}
        usd = plan.get("usd") or {}
        figures.append((plan.get("hours"), usd.get("on_demand"), usd.get("spot")))
        fits = {True: "yes", False: "no"}.get(plan.get("fits"), "no plan")  # type: ignore[arg-type]
        values = [point.changed.get(key, "") for key in keys] or [point.name]
        values += [] if "hw" in keys else [point.config.hw.name]
        table.append([*values, fits, *map(_shown, figures[-1])])
    sums = [[value for value in column if value is not None] for column in zip(*figures, strict=True)]
    shown = [_shown(sum(column)) if column else "" for column in sums]
    table.append(["total", *[""] * (len(table[0]) - 4), *shown])
    return table


def total_lines(points: Sequence[Point], *, points_at_once: int) -> list[str]:
    """Return the table as lines with aligned columns, for the terminal."""
    table = total_table(points)
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    shown = ["  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in table]
    together = "the points one after the other"
    if points_at_once > 1:
        together += f"; {points_at_once} at once end in about 1/{points_at_once} of the hours, for the same money"
    return [f"the whole sweep, {len(points)} points; {together}:", *shown]


def write_total(points: Sequence[Point], *, folder: str) -> str:
    """Write the table as a Markdown page and return its path."""
    titles, *rows = total_table(points)
    text = [_line(titles), _line(["---:"] * len(titles)), *map(_line, rows)]
    paths.make_dirs(folder)
    file = paths.join(folder, PAGE)
    paths.write_text_atomic(file, "\n".join(["# The whole sweep, planned", "", *text, ""]))
    return file


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"


def _line(values: Cells) -> str:
    return "| " + " | ".join(values) + " |"
