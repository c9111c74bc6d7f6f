"""The points of a sweep, a row each: kept in `<sweep>/sweep.json`, shown as CSV and Markdown."""

import csv
import io
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from textwrap import indent
from typing import Any

from tpu_experiments.config.commands import command, override_of
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.escaping import for_markdown
from tpu_experiments.config.redaction import redacted, redacted_arguments
from tpu_experiments.metrics.ranking import rank, ranking_measure
from tpu_experiments.pages.table import markdown_line, right_aligned
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.strict_json import RESULT, shaped
from tpu_experiments.sweeping.points import Point, shown_command

RECORD = "sweep.json"
WAITING, RUNNING, FINISHED, PRUNED, FAILED, STOPPED = "waiting", "running", "finished", "pruned", "failed", "stopped"
ORDER = (FINISHED, RUNNING, PRUNED, STOPPED, WAITING, FAILED)
"""Order of the statuses in the leaderboard."""


@dataclass
class Row:
    """State of one point; what is unknown is None."""

    name: str
    changed: dict[str, str] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    folder: str = ""
    status: str = WAITING
    exit_code: int | None = None
    step: int | None = None
    """Step at which a pruned point was stopped; newest record of a running one."""
    eval_loss_before: float | None = None
    eval_loss: float | None = None
    """Nats per token on the held-out rows, after training or where it was pruned."""
    ranked_by: str | None = None
    """Held-out measure that ranks a finished point before its loss; None: the loss alone."""
    measure: float | None = None
    """Value of that measure."""
    tokens_per_second: float | None = None
    num_trainable: int | None = None
    seconds: float | None = None
    """Wall seconds over all starts of the point."""
    usd_on_demand: float | None = None
    usd_spot: float | None = None
    adapter_path: str | None = None
    findings: list[str] = field(default_factory=list)
    """What the audit found in the point's data."""

    @classmethod
    def of(cls, point: Point) -> "Row":
        """Return the row of a point that has not started."""
        words = redacted_arguments([*point.options, *point.overrides])
        return cls(point.name, redacted(dict(point.changed)), words, point.folder.path())

    def fill_from_result(self, result: dict[str, Any]) -> None:
        """Fill in the fields from a result.json; values of the wrong type are ignored."""
        result = shaped(result, RESULT)
        self.status, self.exit_code, self.step = FINISHED, 0, None
        names = ("eval_loss_before", "eval_loss", "tokens_per_second", "num_trainable", "adapter_path")
        for name in names:
            setattr(self, name, result.get(name))
        self.ranked_by, self.measure = ranking_measure(result) or (None, None)
        self.tokens_per_second = self.tokens_per_second or None  # 0: a restart with no step left to train
        self.findings = [each["message"] for each in result.get("findings") or [] if "message" in each]
        account = (result.get("goodput") or {}).get("run") or {}
        self.seconds = account.get("wall_seconds", self.seconds)
        usd = account.get("usd") or {}
        self.usd_on_demand, self.usd_spot = usd.get("on_demand"), usd.get("spot")

    @property
    def state(self) -> str:
        """Return the status with its exit code or step."""
        if self.status == FAILED:
            return f"failed (exit code {self.exit_code})"
        if self.step is not None and self.status in (PRUNED, RUNNING):
            return f"{self.status} at step {self.step}"
        return self.status


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Sort by status in the order of `ORDER`, then by their measure and held-out loss, best first."""

    def place(row: Row) -> tuple[int, float, float]:
        return ORDER.index(row.status), *rank(row.measure, row.eval_loss)

    return sorted(rows, key=place)


def best_of(rows: Iterable[Row]) -> Row | None:
    """Return the finished point that ranks first, or None."""
    first = next(iter(ranked(rows)), None)
    return first if first is not None and first.status == FINISHED and first.eval_loss is not None else None


def read_rows(folder: str) -> dict[str, Row]:
    """Return the rows of earlier commands by name; empty where there are none.

    Raises:
        ConfigError: the file cannot be read.
    """
    file = paths.join(folder, RECORD)
    if not paths.exists(file):
        return {}
    known = {each.name for each in fields(Row)}
    try:
        stored = strict_json.loads(paths.read_bytes(file))["points"]
        rows = [Row(**{key: value for key, value in each.items() if key in known}) for each in stored]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file}; it cannot be read ({error}); remove it: finished points are known by their own folders."
        ) from error
    for row in rows:
        if row.status == RUNNING:  # the sweep was killed
            row.status = STOPPED
    return {row.name: row for row in rows}


def write_rows(folder: str, rows: Iterable[Row]) -> None:
    """Write sweep.json, replacing an earlier one."""
    points = [asdict(row) for row in rows]
    paths.make_dirs(folder)
    paths.write_text_atomic(paths.join(folder, RECORD), strict_json.dumps({"points": points}, indent=1) + "\n")


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
COMMAND = " " * 4
"""What a line of a command begins with, which makes it code in Markdown."""


def cells(rows: Iterable[Row]) -> list[list[str]]:
    """Return the table: a line of titles, then one line per point; price columns only if a price is known."""
    rows = ranked(rows)
    keys = list(dict.fromkeys(key for row in rows for key in row.changed))
    figures = [c for c in FIGURES if c.field not in PRICES or any(getattr(row, c.field) is not None for row in rows)]
    figures = [*_measured(rows), *figures]
    table = [["#", *keys, *(c.title for c in figures), "status"]]
    for place, row in enumerate(rows, start=1):
        values = [row.changed.get(key, "") for key in keys]
        values += [_shown(getattr(row, c.field), form=c.form) for c in figures]
        table.append([str(place) if row.eval_loss is not None else "", *values, row.state])
    return table


def _measured(rows: Sequence[Row]) -> list[Column]:
    """Return the column of the measure that ranks the points, where they have one."""
    names = dict.fromkeys(row.ranked_by for row in rows if row.ranked_by is not None)
    return [Column(" or ".join(names), "measure", ".4f")] if names else []


def lines(rows: Iterable[Row]) -> list[str]:
    """Return the table as lines with aligned columns."""
    return right_aligned(cells(rows))


def markdown(rows: Sequence[Row], *, name: str, folder: str) -> str:
    """Return a page with the table, the best point and commands to continue with it."""
    table = cells(rows)
    text = [f"# Sweep {for_markdown(name)}", "", _line(table[0]), _line(["---:"] * (len(table[0]) - 1) + ["---"])]
    text += map(_line, table[1:])
    units = "Held-out loss in nats per token; seconds are wall time of all lives of a point."
    text += [
        "",
        units,
        *(f"\n{for_markdown(each)}" for each in findings(rows)),
        "",
        *(each if each.startswith(COMMAND) else for_markdown(each) for each in best(rows, name=name)),
        "",
        *(indent(each, COMMAND) for each in after(name, folder=folder)),
        "",
    ]
    return "\n".join(text)


def best(rows: Iterable[Row], *, name: str) -> list[str]:
    """Return lines with the best point's folder and the command that runs its settings on their own."""
    row = best_of(rows)
    if row is None:
        return ["No point has finished yet."]
    changed = " ".join(" ".join(f"{key}={value}" for key, value in row.changed.items()).split())  # a line of its own
    measured = "" if row.measure is None else f"held-out {row.ranked_by} {row.measure:.4f}, "
    again = shown_command(row.overrides, name=f"{name}_best")
    return [
        f"Best: {changed or row.name}, {measured}held-out loss {row.eval_loss:.4f}",
        f"Its model: {row.adapter_path}",
        "The same settings as a run of their own:",
        "",
        indent(again, COMMAND),
    ]


def findings(rows: Sequence[Row]) -> list[str]:
    """Return each finding of the points' audits once, with the number of points where not all have it."""
    ended = [row for row in rows if row.status == FINISHED]
    counts = Counter(message for row in ended for message in row.findings)
    return [
        f"Finding: {message}" if count == len(ended) else f"Finding ({count} of {len(ended)} points): {message}"
        for message, count in counts.items()
    ]


def after(name: str, *, folder: str) -> list[str]:
    """Return the commands that compare all points of the sweep."""
    place = override_of("output_dir", paths.folder_of(paths.folder_of(folder)))
    compare = command("task=report", override_of("task.runs", [folder]), override_of("name", name), place)
    return [compare, shlex.join(["tensorboard", "--logdir", f"{folder}/tensorboard"])]


def csv_text(rows: Iterable[Row]) -> str:
    """Return one line per point, with figures in full precision."""
    rows = ranked(rows)
    keys = list(dict.fromkeys(key for row in rows for key in row.changed))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    figures = [c.field for c in (*FIGURES, *_measured(rows))]
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
    return markdown_line(list(map(for_markdown, values)))
