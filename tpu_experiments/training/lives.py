"""The ledger of a run's wall time, by process ("life") of the run.

Each process writes its own file, `<run>/lives/0001_<id>.json`, so that no two processes write the same one.
"""

import json
import logging
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.metrics.goodput import HOUR, Life, Stopwatch, account, hourly_price, scalars, split, steps_owed
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.process import boot_seconds
from tpu_experiments.storage.run_folder import RunFolder
from tpu_experiments.storage.spool import Mirror

FOLDER = "lives"
MAX_MARKS = 10_000  # log records kept to find the time of a rollback; a rollback beyond them counts from the oldest
WRITE_SECONDS = 1.0  # shortest interval of writes: records may be milliseconds apart, and a write waits for the disk

log = logging.getLogger(__name__)


class Mark(NamedTuple):
    """Training seconds of this process up to a completed step, and how many of them were lost."""

    step: float
    trained: float
    lost: float
    lost_steps: float

    def moved(self, to: "Mark", origin: "Mark") -> "Mark":
        """Shift the mark by the difference between `to` and `origin`; its step is kept."""
        values = (mine + there - here for mine, there, here in zip(self[1:], to[1:], origin[1:], strict=True))
        return Mark(self.step, *values)


class Shares:
    """Seconds of a machine that each run on it has had: of every moment an equal part.

    So the runs that have ended have together had all the seconds up to the last one's end.
    """

    def __init__(self, num_runs: int, *, began: float) -> None:
        """Start; `began` in seconds since boot."""
        self._left, self._at, self._seconds = num_runs, began, 0.0

    def seconds(self) -> float:
        """Return the seconds of each run that has not left."""
        now = boot_seconds()
        self._seconds += (now - self._at) / max(self._left, 1)
        self._at = now
        return self._seconds

    def leave(self) -> None:
        """Note that a run has ended."""
        self.seconds()
        self._left -= 1


class Ledger:
    """Account of this process's wall time, brought up to date by `update` at every log record."""

    def __init__(
        self,
        folder: RunFolder,
        hw: HwConfig,
        *,
        watch: Stopwatch,
        began: float,
        compile_seconds: Callable[[], float] = lambda: 0.0,
        shares: Shares | None = None,
    ) -> None:
        """Start the account; `began` is the run's first process, in seconds since boot (storage/process.py).

        Args:
            compile_seconds: returns those of this process so far.
            shares: of the machine, where other runs are in the same program.
        """
        place = folder.path(FOLDER)
        paths.make_dirs(place)
        self.earlier = read_lives(place)
        self._began, self._shares = began, shares
        self._watch = watch
        watch.watch_compiler(compile_seconds)
        self._input_wait: Callable[[], float] = lambda: 0.0
        self._marks = deque([Mark(0, 0.0, 0.0, 0)], maxlen=MAX_MARKS)
        """Marks at the log records of steps that were not rolled back."""
        self.life = Life(
            id=f"{len(paths.list_names(place)) + 1:04d}_{uuid.uuid4().hex[:8]}",
            host=socket.gethostname(),
            started=time.time() - (boot_seconds() - began),
            num_devices=hw.num_devices,
            usd_per_hour=hourly_price(hw),
        )
        self._mirror: Mirror | None = Mirror.of_file(paths.join(place, f"{self.life.id}.json"))
        self._written = 0.0
        self._complained = False
        self._write()

    def begin(self, *, step: int, input_wait: Callable[[], float]) -> None:
        """Note that training continues from `step`; `input_wait` returns the seconds waited for batches."""
        self.life.resumed_step = self.life.step = step
        self.life.owed_steps = steps_owed(self.earlier, resumed_step=step)
        self._marks.append(Mark(step, 0.0, 0.0, 0))
        self._input_wait = input_wait
        self._settle(step)
        self._write()

    def update(self, step: int) -> dict[str, float]:
        """Note that everything up to optimizer step `step` is done; return the log record's values.

        They are totals over all lives of the run.
        """
        self._settle(step)
        if time.monotonic() - self._written > WRITE_SECONDS:
            self._write()
        return scalars(self.totals())

    def roll_back(self, step: int, *, num_lost: int) -> None:
        """Note a rollback to `step`: the `num_lost` steps after it, and their time, are lost.

        Some may already be counted as lost, for repeating steps of an earlier process; the new ones replace those.
        """
        last, there, trained = self._marks[-1], self._at(step), self._trained()
        replaced = min(round(last.lost_steps - there.lost_steps), num_lost)
        lost = last.lost + max(trained - there.trained - (last.lost - there.lost), 0.0)
        end = Mark(step, trained, lost, last.lost_steps + num_lost - replaced)
        kept = [mark.moved(end, there) for mark in self._marks if mark.step < step]
        self._marks = deque([*kept, end], maxlen=MAX_MARKS)
        self.life.step, self.life.lost_steps = step, int(end.lost_steps)
        self.life.owed_steps += replaced
        self._settle(step)
        self._write()

    def totals(self) -> dict[str, Any]:
        """Return the account of all processes' lives, this one as of the last update."""
        return account([*self.earlier, self.life])

    def spent(self) -> tuple[float, dict[str, float | None]]:
        """Return the hours of all processes up to now, and their dollars, `on_demand` and `spot`."""
        now = replace(self.life, seconds={"setup": boot_seconds() - self._began})
        totals = account([*self.earlier, now])
        return totals["wall_seconds"] / HOUR, totals["usd"]

    def result(self) -> dict[str, Any]:
        """Return the field `goodput` of result.json."""
        self._settle(self.life.step)
        return {"run": self.totals(), "life": account([self.life])}

    def close(self, ended: str) -> None:
        """Record how this process ended and upload the file; a second call does nothing."""
        if self._mirror is None:
            return
        self._settle(self.life.step)
        self.life.ended = ended
        self._write()
        mirror, self._mirror = self._mirror, None
        mirror.close()

    def _settle(self, step: int) -> None:
        trained = self._trained()
        done = step - self.life.step
        if done > 0:
            again, before = min(done, self.life.owed_steps), self._marks[-1]
            lost = before.lost + (trained - before.trained) * again / done
            self._marks.append(Mark(step, trained, lost, before.lost_steps + again))
            self.life.owed_steps -= again
            self.life.lost_steps += again
            self.life.step = step
        wall, lost = boot_seconds() - self._began, max(self._marks[-1].lost, 0.0)
        if self._shares is not None and wall > 0:
            self.life.share = min(self._shares.seconds() / wall, 1.0)
        seconds, compiled = self._watch.seconds, self._watch.compiled
        self.life.seconds = split(wall, seconds=seconds, compiled=compiled, input_wait=self._input_wait(), lost=lost)

    def _trained(self) -> float:
        """Return the seconds of training in this process so far."""
        self._watch.settle()
        return self._watch.seconds.get("train", 0.0) - self._watch.compiled.get("train", 0.0) - self._input_wait()

    def _at(self, step: int) -> Mark:
        """Return the mark of a step, interpolated between two log records."""
        marks = list(self._marks)
        last = max((index for index, mark in enumerate(marks) if mark.step <= step), default=0)
        start, end = marks[last], marks[min(last + 1, len(marks) - 1)]
        share = (step - start.step) / (end.step - start.step) if end.step > start.step else 0.0
        return Mark(*(value + share * (later - value) for value, later in zip(start, end, strict=True)))

    def _write(self) -> None:
        """Write the file; an error is logged once and never stops the run."""
        if self._mirror is None:
            return
        self._written = time.monotonic()
        try:
            paths.write_text_atomic(str(self._mirror.local), strict_json.dumps(self.life.to_dict(), indent=1) + "\n")
            self._mirror.upload_if_due()
        except OSError as error:
            if not self._complained:
                log.warning("the ledger %s cannot be written: %s", self._mirror.local, error)
            self._complained = True


def read_lives(place: str) -> list[Life]:
    """Return a folder's accounts in the order they began; unreadable ones are logged and skipped."""
    lives = []
    for name in paths.list_names(place):
        if not name.endswith(".json") or name.startswith("."):
            continue
        try:
            lives.append(Life.of(json.loads(paths.read_text(paths.join(place, name)))))
        except (ValueError, TypeError, RecursionError, IsADirectoryError) as error:
            log.warning(
                "%s is not a valid record of a process's time (%s): its time is not counted",
                paths.join(place, name),
                error,
            )
    return lives
