"""Draw line charts of a report as inline SVG; the page's script shows values under the pointer."""

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from tpu_experiments.tasks.report.runs import Curve

WIDTH, HEIGHT = 520, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 30
MAX_POINTS = 400
MAX_DOTS = 12
"""Largest number of points for which each is marked by a dot."""
COLOURS = 8
"""Colours of the page; further runs reuse them with dashed lines."""


@dataclass(frozen=True)
class Line:
    """One run in a chart; `index` is its position on the page and sets its colour."""

    index: int
    label: str
    points: Curve


@dataclass(frozen=True)
class Frame:
    """Data ranges shown by the plot's axes."""

    x: tuple[float, float]
    y: tuple[float, float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return the pixel position of a data point."""
        across = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1.0)
        up = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1.0)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def line_chart(
    lines: Sequence[Line], *, title: str, form: str, borders: Sequence[int] = (), behind: Sequence[Line] = ()
) -> str:
    """Return a chart over the optimizer steps; at least one line must have points.

    Args:
        form: format of a value, as in `{value:form}`.
        borders: steps at which a stage ends, drawn as dashed lines.
        behind: lines drawn faintly, without values under the pointer.
    """
    lines, behind = ([replace(each, points=thinned(each.points)) for each in some] for some in (lines, behind))
    lines = [line for line in lines if line.points]
    points = [point for line in (*lines, *behind) for point in line.points]
    frame = Frame(
        (min(step for step, _ in points), max(step for step, _ in points)),
        spread(min(value for _, value in points), max(value for _, value in points)),
    )
    parts = [*_axes(frame), *(_border(frame, step) for step in borders)]
    parts += [_path(line, frame, kind="raw") for line in behind if line.points]
    parts += [_path(line, frame, kind="line") for line in lines]
    shown = [{"run": line.index, "points": [(s, v, format(v, form)) for s, v in line.points]} for line in lines]
    chart_data = {"x": frame.x, "left": LEFT, "right": WIDTH - RIGHT, "lines": shown}
    data = escape(json.dumps(chart_data, separators=(",", ":")), quote=True)
    last = "; ".join(f"{line.label} ends at {format(line.points[-1][1], form)}" for line in lines)
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{title}: {last}")}" '
        f'data-chart="{data}">{"".join(parts)}'
        f'<line class="guide" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
    )


def _path(line: Line, frame: Frame, *, kind: str) -> str:
    places = [frame.place(step, value) for step, value in line.points]
    shape = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dashed = " dashed" if line.index >= COLOURS else ""
    few = kind == "line" and len(places) <= MAX_DOTS
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places) if few else ""
    return (
        f'<g class="{kind} c{line.index % COLOURS}{dashed}" data-run="{line.index}">'
        f'<title>{escape(line.label)}</title><path d="{shape}"/>{dots}</g>'
    )


def smoothed(points: Curve, *, borders: Sequence[int] = ()) -> Curve:
    """Return the running mean over a window of 1/25 of each stage; short stages are unchanged."""
    stages: dict[int, Curve] = {}
    for step, value in points:
        stages.setdefault(bisect_left(borders, step), []).append((step, value))
    found = []
    for stage in stages.values():
        half = len(stage) // 50
        for at, (step, _) in enumerate(stage):
            window = stage[max(at - half, 0) : at + half + 1]
            found.append((step, sum(value for _, value in window) / len(window)))
    return found


def thinned(points: Curve) -> Curve:
    """Return at most about `MAX_POINTS` points, keeping the lowest and highest of each interval."""
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / MAX_POINTS)
    kept = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return [points[0], *(p for p in kept if p not in (points[0], points[-1])), points[-1]]


def spread(low: float, high: float) -> tuple[float, float]:
    """Return the axis range: a margin of 1/20, from 0 where that is near, and never empty."""
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return (0.0 if 0 <= low <= 0.2 * high else low - margin), high + margin


def ticks(low: float, high: float, *, most: int = 6) -> list[float]:
    """Return round numbers in the range, 1, 2 or 5 times a power of ten apart."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step)
    return [round(i * step, 12) for i in range(first, math.floor(high / step) + 1)]


def _axes(frame: Frame) -> list[str]:
    parts = []
    for value in ticks(*frame.y):
        _, y = frame.place(frame.x[0], value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        parts.append(f'<text class="left" x="{LEFT - 8}" y="{y + 4:.1f}">{shown}</text>')
    for step in ticks(*frame.x):
        if step != int(step):
            continue
        x, _ = frame.place(step, frame.y[0])
        parts.append(f'<text class="under" x="{x:.1f}" y="{HEIGHT - 10}">{step:,.0f}</text>')
    return parts


def _border(frame: Frame, step: int) -> str:
    x, _ = frame.place(step, frame.y[0])
    return f'<line class="border" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
