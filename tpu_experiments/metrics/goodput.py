"""What a run's wall time went to and what it cost, over all lives of its process.

Goodput is the share of the time in which steps were trained that count (Google's ML Goodput divides in the same way:
github.com/AI-Hypercomputer/ml-goodput-measurement)."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from tpu_experiments.config.hardware import HwConfig


class Stopwatch:
    """Exclusive wall seconds per activity: an inner `measure` is subtracted from the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.compiled: dict[str, float] = {}
        """The part of `seconds` that was compilation."""
        self._open: list[str] = []
        self._switched = time.perf_counter()
        self._compile_seconds: Callable[[], float] = lambda: 0.0
        self._compiled_before = 0.0

    def watch_compiler(self, compile_seconds: Callable[[], float]) -> None:
        """Read compile times from `compile_seconds`, the total of this process so far."""
        self._compile_seconds, self._compiled_before = compile_seconds, 0.0

    @contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Add the time spent inside to `activity`."""
        self.settle()
        self._open.append(activity)
        try:
            yield
        finally:
            self.settle()
            self._open.pop()

    def settle(self) -> None:
        """Add the time up to this moment to the innermost open activity."""
        now, compiled = time.perf_counter(), self._compile_seconds()
        for sums, amount in ((self.seconds, now - self._switched), (self.compiled, compiled - self._compiled_before)):
            if self._open:
                sums[self._open[-1]] = sums.get(self._open[-1], 0.0) + amount
        self._switched, self._compiled_before = now, compiled


HOUR = 3600.0
MAX_AMOUNT = 1e15
"""Above any number of steps, seconds or dollars; also excludes infinities and NaN."""
PARTS = ("setup", "compile", "input_wait", "step", "evaluation", "save", "lost")
"""`setup` is the remainder: start, data preparation, loading. `lost`: steps that an earlier life had done already, and
steps that a rollback discarded."""


@dataclass
class Life:
    """One process of a run, from its start to its end or last update; content of its file in `lives/`."""

    id: str
    host: str
    started: float
    """Unix seconds."""
    num_devices: int
    usd_per_hour: dict[str, float | None]
    """Price of all devices, `on_demand` and `spot`; null where it is not known."""
    resumed_step: int = 0
    step: int = 0
    """Last optimizer step that was logged."""
    lost_steps: int = 0
    """Steps repeated that an earlier life had done, and steps that a rollback discarded."""
    owed_steps: int = 0
    """Steps still to be repeated, which count as lost then."""
    ended: str | None = None
    """`finished`, `stopped` or `failed`; null while it runs and after a kill."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall seconds by `PARTS`."""
    share: float = 1.0
    """Part of these seconds that is this run's; less than 1 where other runs were in the same program."""

    @classmethod
    def of(cls, stored: Any) -> "Life":
        """Parse the content of a file of `lives/`; fields of another version are ignored.

        Raises:
            TypeError: a field is missing.
            ValueError: it is no JSON object, or a field is of another type than this program writes.
        """
        if not isinstance(stored, dict):
            raise ValueError("no JSON object")
        known = {each.name: stored[each.name] for each in fields(cls) if each.name in stored}
        for name, value in known.items():
            if not _fits(name, value):
                raise ValueError(f"{name} is {value!r:.60}")
        return cls(**known)

    @property
    def wall_seconds(self) -> float:
        """Seconds from the start to the last update."""
        return sum(self.seconds.values())

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return asdict(self)


def _fits(name: str, value: Any) -> bool:
    """Return whether a field of a life's file has the type that `Life` has there."""
    if name in ("id", "host", "ended"):
        return isinstance(value, str) or (name == "ended" and value is None)
    if name in ("usd_per_hour", "seconds"):
        is_price = name == "usd_per_hour"
        return isinstance(value, dict) and all(_is_amount(n) or (is_price and n is None) for n in value.values())
    return _is_amount(value)


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MAX_AMOUNT


def hourly_price(hw: HwConfig) -> dict[str, float | None]:
    """Return dollars per hour of all devices; None where there is no price."""
    price = hw.price
    if price is None:
        return {"on_demand": None, "spot": None}
    spot = price.usd_per_chip_hour_spot
    return {
        "on_demand": price.usd_per_chip_hour_on_demand * hw.num_devices,
        "spot": None if spot is None else spot * hw.num_devices,
    }


def steps_owed(lives: Sequence[Life], *, resumed_step: int) -> int:
    """Return the steps of these lives that have to be repeated after a restart from `resumed_step`."""
    began = [life for life in lives if life.step or life.resumed_step]  # one that was killed before has no steps
    return began[-1].owed_steps + max(began[-1].step - resumed_step, 0) if began else 0


def split(
    wall: float, *, seconds: Mapping[str, float], compiled: Mapping[str, float], input_wait: float, lost: float
) -> dict[str, float]:
    """Divide wall seconds into `PARTS`, which add up to `wall`.

    `seconds` and `compiled` are a Stopwatch's; `input_wait` and `lost` are part of the training time.
    """
    own = {name: max(value - compiled.get(name, 0.0), 0.0) for name, value in seconds.items()}
    train = own.get("train", 0.0)
    waited = min(input_wait, train)
    again = min(lost, train - waited)
    parts = {
        "compile": sum(compiled.values()),
        "input_wait": waited,
        "step": train - waited - again,
        "evaluation": own.get("eval", 0.0),
        "save": own.get("checkpoint", 0.0),
        "lost": again,
    }
    return {"setup": max(wall - sum(parts.values()), 0.0)} | parts


def account(lives: Sequence[Life]) -> dict[str, Any]:
    """Return seconds, shares and dollars of all lives together, in the order they ran.

    The time between two lives is `down_seconds`, by the clocks of their machines, and no part of the wall time; a life
    that was killed ends with its last update. Dollars are null where a life's price is not known. Of a process of
    several runs, each has its share; `process_seconds` is the whole.
    """
    seconds = {part: sum(life.share * life.seconds.get(part, 0.0) for life in lives) for part in PARTS}
    wall = sum(seconds.values())
    ends = [life.started + life.wall_seconds for life in lives]
    return {
        "lives": len(lives),
        "wall_seconds": wall,
        "process_seconds": sum(life.wall_seconds for life in lives),
        "down_seconds": sum(max(life.started - end, 0.0) for life, end in zip(lives[1:], ends, strict=False)),
        "seconds": seconds,
        "shares": {part: value / wall if wall else 0.0 for part, value in seconds.items()},
        "lost_steps": sum(life.lost_steps for life in lives),
        "usd": {kind: _dollars(lives, kind) for kind in ("on_demand", "spot")},
    }


def scalars(totals: Mapping[str, Any]) -> dict[str, float]:
    """Return `goodput/*` of a log record: each part in percent, hours, and dollars where there is a price."""
    values = {f"goodput/{part}_percent": 100 * share for part, share in totals["shares"].items()}
    values["goodput/wall_hours"] = totals["wall_seconds"] / HOUR
    return values | {f"goodput/usd_{kind}": usd for kind, usd in totals["usd"].items() if usd is not None}


def goodput_lines(totals: Mapping[str, Any] | None) -> list[str]:
    """Return the lines of the closing summary."""
    if not totals:
        return []
    parts = parts_text(totals["seconds"])
    lives = totals["lives"]
    several = "" if lives == 1 else f" over {lives} processes, {totals['down_seconds']:,.0f} s between them"
    dollars = [f"${usd:,.2f} {kind.replace('_', ' ')}" for kind, usd in totals["usd"].items() if usd is not None]
    cost = f"; {', '.join(dollars)}" if dollars else ""
    whole = totals.get("process_seconds", totals["wall_seconds"])
    shared = f", its share of {whole:,.1f} s" if whole > 1.001 * totals["wall_seconds"] else ""
    return [f"  wall time       {totals['wall_seconds']:,.1f} s{shared}{several}: {parts}{cost}"]


def parts_text(seconds: Mapping[str, float]) -> str:
    """Format seconds by `PARTS`."""
    return ", ".join(f"{part.replace('_', ' ')} {value:,.1f}" for part, value in seconds.items())


def _dollars(lives: Sequence[Life], kind: str) -> float | None:
    total = 0.0
    for life in lives:
        price = life.usd_per_hour.get(kind)
        if price is None:
            return None
        total += price * life.share * life.wall_seconds / HOUR
    return total
