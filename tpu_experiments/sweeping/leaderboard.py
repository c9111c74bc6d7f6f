"""Render the ranked points of a sweep as CSV, Markdown and lines for the terminal."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tpu_experiments.io import paths
from tpu_experiments.sweeping.points import shown_command
from tpu_experiments.sweeping.rows import Row, best_of, ranked

NAME = "leaderboard"


@dataclass(frozen=True)
class Column:
    """One figure of a row: its title, its field in `Row` and its format."""

    title: str
    field: str
    form: str


FIGURES = (
    Column("eval loss before", "eval_loss_before", ".4f"),
    Column("eval loss", "eval_loss", ".4f"),
    Column("tokens/s", "tokens_per_second", ",.0f"),
    Column("trainable", "num_trainable", ",d"),
    Column("seconds", "seconds", ",.1f"),
    Column("$ on demand", "usd_on_demand", ",.2f"),
    Column("$ spot", "usd_spot", ",.2f"),
)
PRICES = ("usd_on_demand", "usd_spot")


def cells(rows: Iterable[Row]) -> list[list[str]]:
    """Return the table: a line of titles, then one line per point; price columns only if a price is known."""
    rows = ranked(rows)
    keys = list(dict.fromkeys(key for row in rows for key in row.changed))
    figures = [c for c in FIGURES if c.field not in PRICES or any(getattr(row, c.field) is not None for row in rows)]
    table = [["#", *keys, *(c.title for c in figures), "status"]]
    for place, row in enumerate(rows, start=1):
        values = [row.changed.get(key, "") for key in keys]
        values += [_shown(getattr(row, c.field), form=c.form) for c in figures]
        table.append([str(place) if row.eval_loss is not None else "", *values, row.state])
    return table


def lines(rows: Iterable[Row]) -> list[str]:
    """Return the table as lines with aligned columns."""
    table = cells(rows)
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in table]


def markdown(rows: Sequence[Row], *, name: str, folder: str) -> str:
    """Return a page with the table, the best point and commands to continue with it."""
    table = cells(rows)
    text = [f"# Sweep {name}", "", _line(table[0]), _line(["---:"] * (len(table[0]) - 1) + ["---"])]
    text += [_line(line) for line in table[1:]]
    units = "Held-out loss in nats per token; seconds are wall time of all lives of a point."
    text += ["", units, "", *best(rows, name=name), "", *(f"    {each}" for each in after(name, folder=folder)), ""]
    return "\n".join(text)


def best(rows: Iterable[Row], *, name: str) -> list[str]:
    """Return lines with the best point's folder and the command that runs its settings on their own."""
    row = best_of(rows)
    if row is None:
        return ["No point has finished yet."]
    changed = " ".join(f"{key}={value}" for key, value in row.changed.items())
    again = shown_command(row.overrides, name=f"{name}_best")
    return [
        f"Best: {changed or row.name}, held-out loss {row.eval_loss:.4f}",
        f"Its model: {row.adapter_path}",
        "The same settings as a run of their own:",
        "",
        f"    {again}",
    ]


def after(name: str, *, folder: str) -> list[str]:
    """Return the commands that compare all points of the sweep."""
    compare = f"python run.py task=report 'task.runs=[{folder}]' name={name}"
    return [compare, f"tensorboard --logdir {folder}/tensorboard"]


def csv_text(rows: Iterable[Row]) -> str:
    """Return one line per point, with figures in full precision."""
    rows = ranked(rows)
    keys = list(dict.fromkeys(key for row in rows for key in row.changed))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    figures = [c.field for c in FIGURES]
    writer.writerow(["point", *keys, "status", "exit_code", "step", *figures, "folder"])
    for row in rows:
        own = [row.changed.get(key, "") for key in keys]
        known = ["" if (value := getattr(row, field)) is None else value for field in figures]
        given = ["" if value is None else value for value in (row.exit_code, row.step)]
        writer.writerow([row.name, *own, row.status, *given, *known, row.folder])
    return text.getvalue()


def write(rows: Sequence[Row], *, name: str, folder: str) -> None:
    """Write leaderboard.csv and leaderboard.md, replacing earlier ones."""
    paths.make_dirs(folder)
    paths.write_text_atomic(paths.join(folder, f"{NAME}.csv"), csv_text(rows))
    paths.write_text_atomic(paths.join(folder, f"{NAME}.md"), markdown(rows, name=name, folder=folder))


def _shown(value: float | None, *, form: str) -> str:
    return "" if value is None else format(value, form)


def _line(values: Sequence[str]) -> str:
    return "| " + " | ".join(value.replace("|", "\\|") for value in values) + " |"
