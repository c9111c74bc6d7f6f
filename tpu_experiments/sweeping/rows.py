"""State of a sweep's points: one row each, kept in `<sweep>/sweep.json` so that a kill loses nothing."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.redaction import redacted, redacted_arguments
from tpu_experiments.io import paths, strict_json
from tpu_experiments.io.shapes import RESULT, shaped
from tpu_experiments.sweeping.points import Point

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
    tokens_per_second: float | None = None
    num_trainable: int | None = None
    seconds: float | None = None
    """Wall seconds over all starts of the point."""
    usd_on_demand: float | None = None
    usd_spot: float | None = None
    adapter_path: str | None = None

    @classmethod
    def of(cls, point: Point) -> "Row":
        """Return the row of a point that has not started."""
        return cls(point.name, redacted(dict(point.changed)), redacted_arguments(point.overrides), point.folder.path())

    def take_result(self, result: dict[str, Any]) -> None:
        """Fill in the fields from a result.json; values of the wrong type are ignored."""
        result = shaped(result, RESULT)
        self.status, self.exit_code, self.step = FINISHED, 0, None
        names = ("eval_loss_before", "eval_loss", "tokens_per_second", "num_trainable", "adapter_path")
        for name in names:
            setattr(self, name, result.get(name))
        self.tokens_per_second = self.tokens_per_second or None  # 0: a restart with no step left to train
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
    """Sort by status in the order of `ORDER`, then by held-out loss, best first."""

    def place(row: Row) -> tuple[int, float]:
        return ORDER.index(row.status), float("inf") if row.eval_loss is None else row.eval_loss

    return sorted(rows, key=place)


def best_of(rows: Iterable[Row]) -> Row | None:
    """Return the finished point with the lowest held-out loss, or None."""
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
