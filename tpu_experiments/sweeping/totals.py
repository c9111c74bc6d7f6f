"""Sum the plans of a sweep's points: total hours and dollars before anything is rented."""

import json
from collections.abc import Sequence
from typing import Any

from tpu_experiments.pages.table import markdown_line, right_aligned
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
    shown = right_aligned(total_table(points))
    together = "the points one after the other"
    if points_at_once > 1:
        together += f"; {points_at_once} at once end in about 1/{points_at_once} of the hours, for the same money"
    return [f"the whole sweep, {len(points)} points; {together}:", *shown]


def pack_lines(points: Sequence[Point], packs: Sequence[Point], *, points_at_once: int) -> list[str]:
    """Return a table of the ways to run the points: one after the other, side by side, and in packs.

    Args:
        packs: plans of the programs that several points share (`Point.members`).
    """
    together = {name for pack in packs for name in pack.members}
    packed = [*packs, *(point for point in points if point.name not in together)]
    table: list[Cells] = [["", "GiB per chip", "a step of all, s", "hours", "$ on demand", "$ spot"]]
    table.append(["one after the other", *_figures(points)])
    if points_at_once > 1:
        table.append([f"{points_at_once} at once, a machine each", *_figures(points, at_once=points_at_once)])
    sizes = ", ".join(str(len(pack.members)) for pack in packs)
    table.append([f"in one program each: {sizes}", *_figures(packed, at_once=points_at_once)])
    return right_aligned(table)


def _figures(points: Sequence[Point], *, at_once: int = 1) -> list[str]:
    """Return the largest memory, the sum of steps, and hours and dollars of all plans, empty where one is unknown.

    Hours side by side are at least those of the longest.
    """
    plans = [plan_of(point) or {} for point in points]
    memory = _known([(plan.get("hbm_gib_per_chip") or {}).get("total") for plan in plans])
    steps = _known([plan.get("estimated_step_seconds") for plan in plans])
    hours = _known([plan.get("hours") for plan in plans])
    usd = [_known([(plan.get("usd") or {}).get(kind) for plan in plans]) for kind in ("on_demand", "spot")]
    return [
        _shown(max(memory, default=None)),
        f"{sum(steps):,.3f}" if steps else "",
        _shown(max(sum(hours) / at_once, *hours)) if hours else "",
        *(_shown(sum(values)) if values else "" for values in usd),
    ]


def _known(values: Sequence[float | None]) -> list[float]:
    """Return the values; none at all where one is unknown."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def write_total(points: Sequence[Point], *, folder: str) -> str:
    """Write the table as a Markdown page and return its path."""
    titles, *rows = total_table(points)
    text = [markdown_line(titles), markdown_line(["---:"] * len(titles)), *map(markdown_line, rows)]
    paths.make_dirs(folder)
    file = paths.join(folder, PAGE)
    paths.write_text_atomic(file, "\n".join(["# The whole sweep, planned", "", *text, ""]))
    return file


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"
