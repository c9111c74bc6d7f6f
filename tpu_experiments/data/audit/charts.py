"""Bar charts of the audit page: inline SVG with every value as text."""

from collections.abc import Sequence
from html import escape

WIDTH = 340
ROW_HEIGHT = 24
LABEL_WIDTH = 118
VALUE_WIDTH = 64
COLUMN_HEIGHT = 132
SHORTEST_BAR = 1.5
"""Minimum length of a bar for a value above 0, in pixels."""


def bar_chart(bars: Sequence[tuple[str, float, str]], *, title: str, kind: str = "") -> str:
    """Return horizontal bars from (label, value, value in words).

    `kind` is a CSS class of the page; `learnt` sets the colour of trained tokens.
    """
    most = max((value for _, value, _ in bars), default=0) or 1
    room = WIDTH - LABEL_WIDTH - VALUE_WIDTH
    parts = []
    for i, (label, value, words) in enumerate(bars):
        top, middle = i * ROW_HEIGHT, i * ROW_HEIGHT + ROW_HEIGHT // 2
        length = max(room * value / most, SHORTEST_BAR if value else 0)
        short = label if len(label) <= 19 else f"{label[:18]}…"
        parts += [
            f'<text class="label" x="0" y="{middle + 4}">{escape(short)}<title>{escape(label)}</title></text>',
            f'<rect x="{LABEL_WIDTH}" y="{top + 6}" width="{length:.1f}" height="{ROW_HEIGHT - 12}" rx="2"/>',
            f'<text class="value" x="{LABEL_WIDTH + length + 7:.1f}" y="{middle + 4}">{escape(words)}</text>',
        ]
    return _chart(parts, height=max(len(bars), 1) * ROW_HEIGHT, title=title, bars=bars, kind=kind)


def histogram(counts: Sequence[int], *, edges: Sequence[int], title: str) -> str:
    """Return upright bars between their edges, without the empty bins at both ends.

    The last of `edges` may be missing, for an open bin.
    """
    filled = [i for i, count in enumerate(counts) if count]
    bins = range(filled[0], filled[-1] + 1) if filled else range(0)
    step, most = WIDTH / max(len(bins), 1), max(counts, default=0) or 1
    parts = [f'<line x1="0" y1="{COLUMN_HEIGHT}" x2="{WIDTH}" y2="{COLUMN_HEIGHT}"/>']
    named = [_short_number(edges[i]) for i in bins]
    after = bins.stop if bins else 0
    ends = [*named, _short_number(edges[after]) if after < len(edges) else "more"]
    for column, i in enumerate(bins):
        height = max((COLUMN_HEIGHT - 20) * counts[i] / most, SHORTEST_BAR if counts[i] else 0)
        left, top = column * step, COLUMN_HEIGHT - height
        words = f"{counts[i]:,}" if counts[i] else ""
        parts += [
            f'<rect x="{left + 1:.1f}" y="{top:.1f}" width="{step - 2:.1f}" height="{height:.1f}" rx="2"/>',
            f'<text class="value middle" x="{left + step / 2:.1f}" y="{top - 5:.1f}">{words}</text>',
        ]
    for column, label in enumerate(ends):
        anchor = "" if column == 0 else " last" if column == len(ends) - 1 else " middle"
        parts.append(f'<text class="label{anchor}" x="{column * step:.1f}" y="{COLUMN_HEIGHT + 16}">{label}</text>')
    spoken = [(f"{ends[k]} to {ends[k + 1]}", float(counts[i]), f"{counts[i]:,}") for k, i in enumerate(bins)]
    return _chart(parts, height=COLUMN_HEIGHT + 22, title=title, bars=spoken)


def _short_number(value: int) -> str:
    """Format 1024 as 1k: edges are powers of two."""
    return f"{value // 1024}k" if value >= 1024 and value % 1024 == 0 else str(value)


def _chart(parts: list[str], *, height: int, title: str, bars: Sequence[tuple[str, float, str]], kind: str = "") -> str:
    spoken = "; ".join(f"{label}: {words}" for label, _, words in bars)
    spoken = escape(f"{title}: {spoken}")
    return (
        f'<svg class="{f"chart {kind}".strip()}" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{spoken}">'
        f"{''.join(parts)}</svg>"
    )
