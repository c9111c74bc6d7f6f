"""A plan as one Markdown page: the figures of the terminal as tables, the datasheet, the assumptions."""

from dataclasses import asdict

from tpu_experiments.planning.cells import comparison_cells, ladder_cells, program_cells, search_cells
from tpu_experiments.planning.plan import Plan
from tpu_experiments.planning.report import ESTIMATE, summary_rows


def plan_markdown(plan: Plan, *, chart: str | None = None) -> str:
    """Return one Markdown page: figures as tables, the chip's datasheet, the assumptions.

    Args:
        chart: path of the picture, relative to the page.
    """
    verdict = "fits" if plan.fits else "does **not** fit"
    lines = [
        f"# {plan.model} on {plan.hw.name}",
        "",
        f"The step {verdict} ({plan.method}). Every time is an {ESTIMATE}.",
    ]
    lines += ["", f"![memory and step time]({chart})"] if chart else []
    lines += ["", *_table([("", ""), *((f"**{label}**" if label else "", text) for label, text in summary_rows(plan))])]
    if plan.hw.chip:
        facts = asdict(plan.hw.chip)
        lines += ["", "## Chip", "", *_table([("datasheet", ""), *((k, str(v)) for k, v in facts.items())])]
    if plan.work and plan.work.transfers:
        moved = [
            (t.kind, f"{t.count:,}", f"{t.num_bytes / 1e9:.3f}", f"{t.num_overlapped:,}") for t in plan.work.transfers
        ]
        lines += ["", "## Collectives", "", *_table([("kind", "count", "GB per chip and step", "overlapped"), *moved])]
    for title, cells in (
        ("Programs", program_cells(plan) if plan.programs else []),
        ("Micro-batches", ladder_cells(plan)),
        ("Settings tried", search_cells(plan)),
        ("Machines side by side", comparison_cells(plan)),
    ):
        lines += ["", f"## {title}", "", *_table(cells)] if cells else []
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    return "\n".join([*lines, "", f"Made with {versions}.", ""])


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    cells = [[cell.strip().replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]
