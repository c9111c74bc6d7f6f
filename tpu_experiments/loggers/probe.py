"""Witness of task=resume_check: record a run's steps in a local file, and kill it after a chosen step."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tpu_experiments.loggers.base import LoggerContext, MetricLogger
from tpu_experiments.storage import paths

WAIT_SECONDS = 120.0


class Probe(MetricLogger):
    """Logger of flushed JSON lines: `start`, `rows` when a step is queued, `read` when its loss arrives.

    Args:
        context: of the run.
        path: a local file; every start of the run appends to it.
        kill_after: SIGKILL the whole run when the loss of this step arrives; None never. A run logs a step before it
            writes a checkpoint of it or of a later one, so what is lost is known.
        marker: a file below the run folder to wait for before the kill: a checkpoint written in the background is
            complete once its marker exists.
    """

    def __init__(
        self, context: LoggerContext, *, path: str, kill_after: int | None = None, marker: str | None = None
    ) -> None:
        self._context, self._kill_after, self._marker = context, kill_after, marker
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 (until finish)
        self._write({"event": "start", "resume_step": context.resume_step})

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Record a training loss; other records are ignored."""
        if "train/loss" not in values:
            return
        self._write({"event": "read", "step": step, "loss": values["train/loss"], "lr": values["train/lr"]})
        if self._kill_after is not None and step >= self._kill_after:
            self._kill()

    def rows(self, step: int, labels: list[str]) -> None:
        """Record `source:row` of every row of the global batch."""
        self._write({"event": "rows", "step": step, "rows": labels})

    def finish(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event | {"time": time.time()}) + "\n")
        self._file.flush()

    def _kill(self) -> None:
        """Kill this process and, with `spawn`, its parent first, whose end takes the other processes along."""
        self._wait_for_marker()
        if self._context.config.hw.parallel == "spawn":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def _wait_for_marker(self) -> None:
        if self._marker is None:
            return
        marker = self._context.run_folder.path(self._marker)
        deadline = time.monotonic() + WAIT_SECONDS
        while not paths.exists(marker):
            assert time.monotonic() < deadline, f"{marker} is not there {WAIT_SECONDS} s after its step"
            time.sleep(0.02)
