"""Run a command at events of a run, such as one that sends a message."""

import logging
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from tpu_experiments.callbacks.base import Callback, Checkpoint, Ended, Moment, is_number
from tpu_experiments.config.errors import ConfigError, one_line, suggest
from tpu_experiments.config.redaction import redacted_text
from tpu_experiments.storage import strict_json

AT = ("start", "evaluate", "save", "end")

log = logging.getLogger(__name__)


class RunCommand(Callback):
    """Runs a command in a thread, one at a time and without a shell; it reads the event as JSON from stdin.

    An event is `{"event", "text", "run", "folder", "step", "total_steps", "metrics"}`, `text` a sentence of it; with
    `loss` in `metrics` and so on as they are logged. A command that fails or takes too long is logged.
    """

    def __init__(
        self, *, command: Sequence[str], at: Sequence[str] = ("start", "end"), max_seconds: float | None = 30.0
    ) -> None:
        """Take the settings.

        Args:
            command: the program and its arguments.
            at: events, of `AT`.
            max_seconds: after which a command is ended; null: never.
        """
        if isinstance(command, str) or not command:
            raise ConfigError(f"command={command!r}; write the program and its arguments as a list.")
        if shutil.which(str(command[0])) is None:
            raise ConfigError(f"command={list(command)}; there is no program {command[0]} on this machine.")
        for event in at:
            if event not in AT:
                raise ConfigError(f"at={list(at)}; {event!r} is no event. {suggest(event, AT)}")
        if max_seconds is not None and not (is_number(max_seconds) and max_seconds > 0):
            raise ConfigError(f"max_seconds={max_seconds}; it must be a number above 0, or null.")
        self._command, self._at, self._max_seconds = [str(word) for word in command], set(at), max_seconds
        self._threads: ThreadPoolExecutor | None = None
        self._running: list[Future[None]] = []

    def on_start(self, run: Moment) -> None:
        """Tell that training begins."""
        begins = f"goes on at step {run.step}" if run.step else "begins"
        self._tell("start", run, f"{run.run_folder.name} {begins}, of {run.total_steps} steps")

    def on_evaluate(self, run: Moment, values: Mapping[str, float]) -> None:
        """Tell the held-out loss."""
        self._tell("evaluate", run, f"{run.run_folder.name}, step {run.step}: held-out loss {values['eval/loss']:.4f}")

    def on_save(self, run: Moment, checkpoint: Checkpoint) -> None:
        """Tell of a checkpoint."""
        self._tell("save", run, f"{run.run_folder.name}: checkpoint {checkpoint.path}")

    def on_end(self, run: Moment, ended: Ended, why: str) -> None:
        """Tell how it ended, and wait until all is told; a run that was asked to stop leaves out what waits."""
        left = [each for each in self._running if each.cancel()] if ended == "stopped" else []
        if left:
            log.warning("callbacks.%s: %d events are not told: the run was asked to stop", run.callback, len(left))
        reason = f": {why}" if why else ""
        self._tell("end", run, f"{run.run_folder.name} {ended} after step {run.step}{reason}", ended=ended)
        wait(self._running)
        if self._threads is not None:
            self._threads.shutdown()

    def _tell(self, event: str, run: Moment, text: str, **more: Any) -> None:
        if event not in self._at:
            return
        facts: dict[str, Any] = {"event": event, "text": redacted_text(text), **more}
        facts |= {"run": run.run_folder.name, "folder": run.run_folder.path()}
        facts |= {"step": run.step, "total_steps": run.total_steps, "metrics": dict(run.metrics)}
        self._threads = self._threads or ThreadPoolExecutor(1, thread_name_prefix="command")
        told = self._threads.submit(self._run, strict_json.dumps(facts), run.callback)
        self._running = [*(each for each in self._running if not each.done()), told]

    def _run(self, text: str, name: str) -> None:
        problem = None
        try:
            done = subprocess.run(
                self._command,
                input=text,
                encoding="utf-8",
                errors="replace",
                capture_output=True,
                timeout=self._max_seconds,
                check=False,
            )
            if done.returncode:
                problem = f"exit code {done.returncode}: {' '.join((done.stderr or done.stdout).split())[-300:]}"
        except subprocess.TimeoutExpired:
            problem = f"it took more than {self._max_seconds:g} s"
        except Exception as error:  # no one reads what a thread raises
            problem = one_line(error)
        if problem is not None:
            log.warning("callbacks.%s: %s failed (%s)", name, self._command[0], problem)
