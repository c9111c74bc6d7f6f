"""The ledger of a run's wall time: `<run>/lives/0001_<id>.json`, one file a life, so that no two writers share one."""

import json
import logging
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any

from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.io import paths, strict_json
from tpu_experiments.io.folder import RunFolder
from tpu_experiments.io.mirror import Mirror
from tpu_experiments.io.process import boot_seconds
from tpu_experiments.metrics.goodput import Life, account, hourly_price, scalars, split
from tpu_experiments.metrics.stopwatch import Stopwatch

FOLDER = "lives"
WRITE_SECONDS = 1.0  # a record may come every few milliseconds; a write waits for the disk

log = logging.getLogger(__name__)


class Ledger:
    """This life's account; `update` renews it, at every log record."""

    def __init__(
        self,
        folder: RunFolder,
        hw: HwConfig,
        *,
        watch: Stopwatch,
        began: float,
        compile_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`began`: when the run's first process did, in seconds since the boot (io/process.py).

        `compile_seconds` says how many there have been in this process so far.
        """
        place = folder.path(FOLDER)
        paths.make_dirs(place)
        self.earlier = read_lives(place)
        self._began = began
        self._watch = watch
        watch.watch_compiler(compile_seconds)
        self._input_wait: Callable[[], float] = lambda: 0.0
        self._lost = 0.0
        self._trained = 0.0
        self._redo_until = max((life.step for life in self.earlier), default=0)
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
        """Training goes on from `step`; `input_wait` says the seconds that batches were waited for so far."""
        self.life.resumed_step = self.life.step = step
        self._input_wait = input_wait
        self._settle(step)
        self._write()

    def update(self, step: int) -> dict[str, float]:
        """Everything up to optimizer step `step` is done; values of the log record, over all lives."""
        self._settle(step)
        if time.monotonic() - self._written > WRITE_SECONDS:
            self._write()
        return scalars(self.totals())

    def totals(self) -> dict[str, Any]:
        """The account of all lives, this one as it stands at the last update."""
        return account([*self.earlier, self.life])

    def result(self) -> dict[str, Any]:
        """The field `goodput` of result.json."""
        self._settle(self.life.step)
        return {"run": self.totals(), "life": account([self.life])}

    def close(self, ended: str) -> None:
        """Note how the life ended, and bring the file to its place; a second call does nothing."""
        if self._mirror is None:
            return
        self._settle(self.life.step)
        self.life.ended = ended
        self._write()
        mirror, self._mirror = self._mirror, None
        mirror.close()

    def _settle(self, step: int) -> None:
        self._watch.settle()
        seconds, compiled = self._watch.seconds, self._watch.compiled
        trained = seconds.get("train", 0.0) - compiled.get("train", 0.0) - self._input_wait()
        done, again = step - self.life.step, min(step, self._redo_until) - self.life.step
        if done > 0:
            if again > 0:
                self._lost += (trained - self._trained) * again / done
                self.life.lost_steps += again
            self._trained, self.life.step = trained, step
        wall = boot_seconds() - self._began
        self.life.seconds = split(
            wall, seconds=seconds, compiled=compiled, input_wait=self._input_wait(), lost=max(self._lost, 0.0)
        )

    def _write(self) -> None:
        """The ledger is never a reason to stop."""
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
    """The lives of a folder, in the order they began; one that cannot be read is named in the log and left out."""
    lives = []
    for name in paths.list_names(place):
        if not name.endswith(".json") or name.startswith("."):
            continue
        try:
            lives.append(Life(**json.loads(paths.read_text(paths.join(place, name)))))
        except (ValueError, TypeError) as error:
            log.warning("%s is no life of a run (%s); left out of its account", paths.join(place, name), error)
    return lives
