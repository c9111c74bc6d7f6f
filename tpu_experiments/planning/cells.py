"""Rows of the tables that terminal and page share, as text; the first row is the header."""

from tpu_experiments.planning.money import Dollars
from tpu_experiments.planning.plan import Comparison, Plan

Cells = tuple[str, ...]


def comparison_cells(plan: Plan) -> list[Cells]:
    """Return one row per machine, this plan's first; empty without a comparison."""
    if not plan.comparisons:
        return []
    rows = [plan.as_comparison(), *plan.comparisons]
    speeds = [row.tokens_per_second for row in rows if row.tokens_per_second]
    header = (
        "hw",
        "chips",
        "fits",
        "step s",
        "tokens/s",
        "speed-up",
        "hours",
        "$ spot",
        "$ listed",
        "$/M tokens",
        "from",
    )
    return [header, *(_comparison(row, slowest=min(speeds, default=1.0)) for row in rows)]


def _comparison(row: Comparison, *, slowest: float) -> Cells:
    speed = row.tokens_per_second
    return (
        row.hw,
        str(row.chips),
        {True: "yes", False: "no", None: "?"}[row.fits],
        fixed(row.step_seconds, digits=3),
        fixed(speed, digits=0),
        "-" if speed is None else f"{speed / slowest:.1f}x",
        fixed(row.hours, digits=2),
        amount(row.usd.spot),
        amount(row.usd.on_demand),
        amount(row.usd_per_million_tokens.on_demand),
        row.method,
    )


def ladder_cells(plan: Plan) -> list[Cells]:
    """Return one row per micro-batch tried; empty without a ladder."""
    if not plan.ladder:
        return []
    header = ("rows per chip", "GiB per chip", "predicted", "fits")
    return [
        header,
        *(
            (str(r.micro_batch), fixed(r.total_gib, digits=2), fixed(r.predicted_gib, digits=2), yes(r.fits))
            for r in plan.ladder
        ),
    ]


def search_cells(plan: Plan) -> list[Cells]:
    """Return one row per combination, the best first; empty without a search."""
    if not plan.search:
        return []
    header = ("outcome", "step s", "GiB per chip", "settings")
    return [
        header,
        *(
            (t.outcome, fixed(t.step_seconds, digits=3), fixed(t.total_gib, digits=2), settings(t.overrides))
            for t in plan.search
        ),
    ]


def settings(overrides: tuple[str, ...]) -> str:
    """Join overrides in the form that the command line takes."""
    return " ".join(overrides) or "as configured"


def program_cells(plan: Plan) -> list[Cells]:
    """Return one row per program of the run."""
    header = ("program", "batch", "stages", "compiled in s", "GiB per chip", "estimated s")
    return [
        header,
        *(
            (
                p.name,
                p.shape,
                ", ".join(p.stages) or "-",
                fixed(p.compile_seconds, digits=0),
                fixed(p.total_gib, digits=2),
                fixed(p.estimated_seconds, digits=4),
            )
            for p in plan.programs
        ),
    ]


def aligned(rows: list[Cells]) -> list[str]:
    """Return lines with columns as wide as their widest cell, the last one left-aligned."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))] if rows else []
    return [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]


def fixed(value: float | None, *, digits: int) -> str:
    """Format a figure with thousands separators; `-` where unknown."""
    return "-" if value is None else f"{value:,.{digits}f}"


def yes(value: bool) -> str:
    """Return `yes` or `no`."""
    return "yes" if value else "no"


def both(dollars: Dollars) -> str:
    """Format both prices: `$1.20 spot, $3.40 on demand`."""
    return f"{amount(dollars.spot)} spot, {amount(dollars.on_demand)} on demand"


def amount(usd: float | None) -> str:
    """Format dollars with two decimals, with four below a dollar; `-` where unknown."""
    if usd is None:
        return "-"
    return f"${usd:,.2f}" if usd >= 1 or usd == 0 else f"${usd:.4f}"
