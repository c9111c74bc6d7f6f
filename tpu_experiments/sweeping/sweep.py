"""Run the points of a sweep, several at once, and record the outcome of each."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.metrics.goodput import account
from tpu_experiments.storage import paths
from tpu_experiments.storage.retry import is_transient, shown
from tpu_experiments.storage.run_folder import open_run
from tpu_experiments.sweeping import hparams, leaderboard
from tpu_experiments.sweeping.budget import seconds_left, usd_of
from tpu_experiments.sweeping.engines.base import Engine, Started
from tpu_experiments.sweeping.leaderboard import FAILED, FINISHED, PRUNED, RUNNING, STOPPED, Row, read_rows, write_rows
from tpu_experiments.sweeping.packs import COUNTS, chosen_size, pack_plans, packs_of, packs_text, settled, shortage_text
from tpu_experiments.sweeping.placement import slots
from tpu_experiments.sweeping.points import Point
from tpu_experiments.sweeping.pruning import Evaluations, no_pruning_reason, step_to_prune_at
from tpu_experiments.sweeping.screen import Screen
from tpu_experiments.training.lives import FOLDER as LIVES
from tpu_experiments.training.lives import read_lives
from tpu_experiments.training.stop import STOPPED_EXIT_CODE

REFUSED_EXIT_CODE = 2
LOOK_SECONDS = 0.2
READ_SECONDS = 1.0
READ_REMOTE_SECONDS = 30.0  # shortest period between uploads of metrics.jsonl (storage/spool.py)


@dataclass
class Running:
    """Points that the engine has started in one process."""

    points: list[Point]
    """Those that have not ended."""
    process: Started
    started: float = field(default_factory=time.monotonic)
    pruned_at: dict[str, int] = field(default_factory=dict)
    """Step at which a point was asked to end, by its name."""

    @property
    def config(self) -> Config:
        """Return the config of one of the points."""
        return self.first.config

    def __post_init__(self) -> None:
        self.first, self.num_points = self.points[0], len(self.points)

    def failed_text(self, code: int) -> str | None:
        """Return what to do where a pack failed as a whole, by the exit code of its process; else None."""
        if self.num_points == 1 or code in (0, STOPPED_EXIT_CODE) or 0 in self.process.codes().values():
            return None
        fewer = f"sweeping.pack={self.num_points // 2}" if self.num_points > 3 else "sweeping.pack=off"
        return f"no point of a program with {self.num_points} of them finished; {fewer} takes less memory"


class Sweep:
    """One sweep's folder and points; `run` is called again whenever a sampler asks for more points."""

    def __init__(self, folder: str, *, name: str, engine: Engine) -> None:
        """Read the rows of earlier commands.

        Raises:
            ConfigError: sweep.json cannot be read.
        """
        self.folder, self.name, self.engine = folder, name, engine
        self.points: dict[str, Point] = {}
        self.rows = read_rows(folder)
        self.screen = Screen(is_live=False)
        self.has_run = False
        """Whether this command has started a point."""
        self.pack_plans: list[Point] = []
        """Plans of the programs that several points share."""
        self._evaluations: dict[str, Evaluations] = {}
        self._running: dict[int, Running] = {}
        self._ended_usd = 0.0
        self._read_at = 0.0
        self._is_unwritten = self._is_out_of_reach = False

    @property
    def unfinished(self) -> list[str]:
        """Return the names of this command's points that are not finished, pruned or failed."""
        return [name for name in self.points if self.rows[name].status not in (FINISHED, PRUNED, FAILED)]

    @property
    def failed(self) -> list[str]:
        """Return the names of this command's points that failed."""
        return [name for name in self.points if self.rows[name].status == FAILED]

    @property
    def spent_usd(self) -> float:
        """Return what the points of this command have cost so far, from their starts on."""
        now = time.monotonic()
        return self._ended_usd + sum(usd_of(r.config, now - r.started) for r in self._running.values())

    def run(self, points: Sequence[Point]) -> None:
        """Run the points that are not done, until all have ended or a stop request has ended those running.

        Raises:
            ConfigError: a point's folder was created with another config, or the engine cannot run the points; nothing
                was started.
        """
        waiting = [point for point in {point.name: point for point in points}.values() if not self._is_done(point)]
        if waiting:
            self.engine.open(waiting, folder=self.folder, say=self._say)
        self._write()
        if not waiting:
            return
        packs = self._packs(waiting)
        at_once = slots(waiting[0].config)
        # A single point writes to the terminal itself.
        self.screen = Screen(is_live=(at_once > 1 or self.engine.is_elsewhere) and sys.stdout.isatty())
        self._say(no_pruning_reason(waiting[0].config))
        if self.engine.is_elsewhere and at_once == 1 < len(waiting):
            self._say(
                f"sweeping.points_at_once=1: the {len(waiting)} points run one after the other; a higher number runs "
                "as many at once"
            )
        while packs or self._running or (self._is_unwritten and not self.engine.asked):
            while packs and len(self._running) < at_once and not self.engine.asked:
                slot = next(slot for slot in range(at_once) if slot not in self._running)
                self._start(packs.pop(0), slot)
            for slot, running in list(self._running.items()):
                code = running.process.poll()
                codes = running.process.codes()
                for point in list(running.points):
                    if point.name in codes or code is not None:
                        running.points.remove(point)
                        self._ended(running, point, codes.get(point.name, code))
                if code is not None:
                    del self._running[slot]
                    self._say(running.failed_text(code) if not self.engine.asked else None)
                    self._ended_usd += usd_of(running.config, time.monotonic() - running.started)
            self._prune_due()
            self._stop_at_limit()
            if self.engine.asked:
                packs.clear()
            time.sleep(LOOK_SECONDS)
        self.screen.close(leaderboard.lines(self.rows.values()))

    def refuse(self, name: str, *, changed: dict[str, str], why: str) -> None:
        """Record a point that a sampler drew and the checks refuse."""
        self.rows[name] = Row(name, changed, status=FAILED, exit_code=REFUSED_EXIT_CODE)
        self._say(f"sweep point {name} is refused: {why}")
        self._write(self.rows[name])

    def _is_done(self, point: Point) -> bool:
        """Return whether the point was finished or pruned before, and update its row."""
        before = self.rows.get(point.name)
        row = before if before is not None and before.status == PRUNED else Row.of(point)
        result = self._opened(point) if point.config.task.name == "train" else None
        if result is not None:
            row = Row.of(point)
            row.fill_from_result(result)
        self.points[point.name], self.rows[point.name] = point, row
        if row.status not in (FINISHED, PRUNED):
            return False
        self._evaluations_of(point).refresh()
        self.screen.say(f"sweep point {point.name} was {row.state} before")
        hparams.write_session(row, folder=self.folder)
        return True

    def _opened(self, point: Point) -> dict[str, Any] | None:
        try:
            return open_run(point.config).finished()
        except ConfigError as error:  # the user chose the sweep's name, not the point's
            raise ConfigError(str(error).replace(f"name={point.name};", f"name={self.name};", 1)) from error

    def _packs(self, points: Sequence[Point]) -> list[list[Point]]:
        """Return the points by the process that trains them, and say how `sweeping.pack` groups them."""
        chosen, task = points[0].config.sweeping.pack, points[0].config.task.name
        if chosen == "off" or task not in ("train", "plan"):
            return [[point] for point in points]
        if not self.engine.has_packs:
            self._say(f"sweeping.pack={chosen} has no effect with sweeping.engine={self.engine.name}")
            return [[point] for point in points]
        known, own = settled(points), {point.name: point for point in points}
        largest, why = chosen_size(known)
        packs = packs_of(known, largest=largest)
        for sentence in packs_text(packs):
            self.screen.say(f"{sentence}; {why}" if why and sentence.startswith(COUNTS) else sentence)
        if chosen != "auto":
            self._say(next(filter(None, map(shortage_text, packs)), None))
        packs = [[own[point.name] for point in pack] for pack in packs]
        if task == "train":
            return packs
        self.pack_plans = pack_plans(packs)
        for plan in self.pack_plans:
            self.rows[plan.name] = Row.of(plan)
        return [[point] for point in [*points, *self.pack_plans]]

    def _start(self, points: list[Point], slot: int) -> None:
        for point in points:
            self.screen.say(f"sweep point {point.name} -> {point.folder.path()}")
            self.rows[point.name].status = RUNNING
        if len(points) == 1:
            limit = seconds_left(points[0].config, spent_usd=self.spent_usd)
            started = self.engine.start(points[0], slot=slot, limit_seconds=limit)
        else:
            started = self.engine.start_pack(points, slot=slot)
        self._running[slot] = Running(list(points), started)
        self.has_run = True

    def _ended(self, running: Running, point: Point, code: int | None) -> None:
        """Record the outcome of a point that has ended."""
        row, pruned_at = self.rows[point.name], running.pruned_at.get(point.name)
        row.exit_code, row.seconds = code, time.monotonic() - running.started
        if len(running.points) > 1:  # its share of the program's time
            lives = read_lives(point.folder.path(LIVES))
            row.seconds = account(lives)["wall_seconds"] if lives else None
        result = point.folder.finished() if code == 0 and point.config.task.name == "train" else None
        self._evaluations_of(point).refresh()
        if result is not None:
            row.fill_from_result(result)
        elif code == 0:
            row.status = FINISHED
        elif code == STOPPED_EXIT_CODE and pruned_at is not None:
            row.status, row.step = PRUNED, pruned_at
            row.eval_loss = self._evaluations_of(point).losses.get(pruned_at)
        elif code == STOPPED_EXIT_CODE or self.engine.asked:
            row.status = STOPPED
            self.engine.ask()  # a stop signal sent to one point stops the whole sweep
        else:
            row.status = FAILED
            why = f" ({running.process.why})" if running.process.why else ""
            self._say(f"sweep point {point.name} ended with exit code {code}{why}; the sweep continues")
        self._write(row)

    def _stop_at_limit(self) -> None:
        """Ask the points to stop once they have cost `sweeping.max_usd`."""
        limits = [running.config.sweeping.max_usd for running in self._running.values()]
        limit = min((each for each in limits if each is not None), default=None)
        if limit is not None and self.spent_usd >= limit and not self.engine.asked:
            self._say(f"sweeping.max_usd={limit:g}: the points have cost ${self.spent_usd:.2f}, and are stopped")
            self.engine.ask()

    def _prune_due(self) -> None:
        """Read the points' progress and prune those that the median rule gives up."""
        period = READ_REMOTE_SECONDS if paths.is_remote(self.folder) else READ_SECONDS
        if time.monotonic() - self._read_at < period:
            return
        self._read_at = time.monotonic()
        if self._is_unwritten:
            self._write()
        with self._through_outages():
            for point in self._points():
                known = self._evaluations_of(point)
                known.refresh()
                row = self.rows[point.name]
                row.step, row.eval_loss = known.last_step or None, None
        for running in self._running.values():
            for point in running.points:
                self._prune(running, point)
        if self._running:
            self.screen.show(leaderboard.lines(self.rows.values()), has_ended=False)

    def _points(self) -> Iterator[Point]:
        """Yield the points that run."""
        for running in self._running.values():
            yield from running.points

    def _prune(self, running: Running, point: Point) -> None:
        settings = point.config.sweeping
        if settings.prune == "none" or point.name in running.pruned_at or self.engine.asked:
            return
        own = self._evaluations_of(point).losses
        others = [known.losses for name, known in self._evaluations.items() if name != point.name]
        step = step_to_prune_at(own, others, settings)
        if step is not None:
            running.pruned_at[point.name] = step
            self._say(f"sweep point {point.name} is pruned at step {step}: held-out loss {own[step]:.4f}")
            running.process.drop(point.name)

    def _evaluations_of(self, point: Point) -> Evaluations:
        return self._evaluations.setdefault(point.name, Evaluations(point.folder))

    def _write(self, ended: Row | None = None) -> None:
        """Write the record, leaderboard and, for an ended point, its TensorBoard session and the table."""
        rows = list(self.rows.values())
        are_trained = all(point.config.task.name == "train" for point in self.points.values())
        self._is_unwritten = True
        with self._through_outages():
            write_rows(self.folder, rows)
            if are_trained:
                leaderboard.write(rows, name=self.name, folder=self.folder)
            if are_trained and ended is not None:
                hparams.write_session(ended, folder=self.folder)
            self._is_unwritten = False
        if are_trained and ended is not None:
            self.screen.show(leaderboard.lines(rows), has_ended=True)

    @contextmanager
    def _through_outages(self) -> Iterator[None]:
        """Have points that run elsewhere continue while the bucket is out of reach from here; say so once."""
        try:
            yield
            self._is_out_of_reach = False
        except Exception as error:
            if not (self.engine.is_elsewhere and self.has_run and is_transient(error)):
                raise
            if not self._is_out_of_reach:
                self._say(f"{self.folder} is out of reach ({shown(error)}); the points continue, and it is tried again")
            self._is_out_of_reach = True

    def _say(self, sentence: str | None) -> None:
        if sentence is not None:
            self.screen.say(sentence, warning=True)
