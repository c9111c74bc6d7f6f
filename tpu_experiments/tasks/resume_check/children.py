"""Run the starts of a resume check's two runs: run.py in child processes, watched by a probe."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tpu_experiments.checkpoint.store import COMMIT, latest_step
from tpu_experiments.config.commands import override_of
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.folders import COMMAND
from tpu_experiments.config.schema import Config
from tpu_experiments.runtime.processes.env import compile_cache_root
from tpu_experiments.runtime.processes.tether import tied_command
from tpu_experiments.storage import paths
from tpu_experiments.training.batches import prepared_folder

log = logging.getLogger(__name__)
WHOLE, KILLED = "whole", "killed"
# XLA's multi-threaded CPU matrix products have no fixed order of summation: on a busy machine they differ by an ulp.
ONE_ORDER = "--xla_cpu_multi_thread_eigen=false"
SHOWN_LINES = 20
OURS = ("task", "name", "output_dir")
GIB = 2**30
LOG_EVERY_STEPS = 3
"""Steps between two log records of the children.

Above 1, so that checkpoints fall inside a record's window, whose losses they must hold (Progress.open_losses).
"""


class LifeFailed(RuntimeError):
    """A child ended unexpectedly; the message has its last lines."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL at the first log record from step `after` on, once checkpoint `checkpoint` is complete."""

    checkpoint: int
    after: int
    where: str
    every_steps: int
    """`checkpoint.every_steps` of the process that is killed."""
    is_second_save: bool = False
    """Whether it is the process's second checkpoint by steps, saved in the background if the config allows."""


@dataclass
class Life:
    """One process of a run, from its start to its end or kill."""

    run: str
    kill: Kill | None
    started: float
    """Start in unix seconds."""
    resume_step: int = 0
    """Step of the checkpoint it resumed from; 0 for a fresh start."""
    rows: dict[int, list[str]] = field(default_factory=dict)
    """`source:row` of every row by step, in the order they were queued."""
    read: dict[int, float] = field(default_factory=dict)
    """Losses that arrived, by step."""
    first_step: float = 0.0
    """Unix seconds at which its first step was done: the second was queued or the first log record arrived."""
    checkpoint_after: int = 0
    """Step of the newest complete checkpoint at its end."""
    was_in_background: bool = False
    """Whether that checkpoint was written by a background thread."""
    checkpoint_bytes: int = 0
    """Bytes of the checkpoint it resumed from."""


class Children:
    """Start the processes one after the other."""

    def __init__(self, config: Config, *, place: str, witness: Path) -> None:
        self._config, self._place, self._witness = config, place, witness
        self._common = [*user_overrides(sys.argv[1:]), *check_overrides(config, place=place)]

    def run_process(self, run: str, *, kill: Kill | None = None) -> Life:
        """Run one process of a run to its end or kill.

        Raises:
            ConfigError: the child was refused at its run's first start.
            LifeFailed: it ended unexpectedly.
        """
        events, output = self._witness / "events", self._witness / "output"
        events.unlink(missing_ok=True)
        checkpoints = paths.join(self._place, run, "checkpoints")
        life = Life(run, kill, time.time(), checkpoint_bytes=size_of_newest(checkpoints))
        log.info("%s: %s", run, f"until it is killed after step {kill.after}, {kill.where}" if kill else "to its end")
        with output.open("wb") as file:
            code = subprocess.run(
                tied_command([*COMMAND, *self._common, f"name={run}", *kill_overrides(events, kill)]),
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(self._config),
                check=False,
            ).returncode
        self._require(code, output, life=life)
        read_events(life, events)
        life.checkpoint_after = latest_step(checkpoints)
        settings = self._config.checkpoint
        if kill is not None and kill.is_second_save and settings.background:
            life.was_in_background = size_of_newest(checkpoints) <= settings.max_copy_gib * GIB
        return life

    def _require(self, code: int, output: Path, *, life: Life) -> None:
        if code == (-signal.SIGKILL if life.kill else 0):
            return
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
        problems = [line.removeprefix("error: ") for line in lines if line.startswith(("error: ", "       "))]
        if code == 2 and not life.checkpoint_bytes:
            raise ConfigError("\n".join(problems) or lines[-1])
        if code == 2:
            raise LifeFailed(
                "task=resume_check; the run that was killed is refused when it resumes from its checkpoint: "
                + ("\n".join(problems) or lines[-1])
            )
        shown = "\n".join(lines[-SHOWN_LINES:])
        raise LifeFailed(f"task=resume_check; a child ended with exit code {code}; its last lines:\n{shown}")


def user_overrides(arguments: list[str]) -> list[str]:
    """Return the user's overrides without those that the check sets itself."""
    keys = [(argument, argument.lstrip("+~").partition("=")[0]) for argument in arguments]
    return [
        argument for argument, key in keys if key not in (*OURS, "-m", "--multirun") and not key.startswith("task.")
    ]


def check_overrides(config: Config, *, place: str) -> list[str]:
    """Return overrides for the child's folders, stage length and logging: jsonl is its only logger.

    Callbacks are left out, since a child is killed and resumed, of which nobody is to be told.
    """
    cache = compile_cache_root(config)
    overrides = [
        "task=train",
        override_of("output_dir", place),
        override_of("prepare.folder", prepared_folder(config)),
        override_of("hw.compile_cache", cache or "none"),
        f"trainer.max_stage_steps={config.trainer.max_stage_steps}",
        f"trainer.log_every_steps={LOG_EVERY_STEPS}",
        "trainer.profile.start_step=null",
    ]
    overrides += [f"~callbacks.{name}" for name in config.callbacks]
    return overrides + [f"~logger.{name}" for name in config.logger if name != "jsonl"]


def kill_overrides(events: Path, kill: Kill | None) -> list[str]:
    """Return overrides for when a child saves, metrics.jsonl, and the probe that watches and kills it."""
    options: dict[str, Any] = {"path": str(events)}
    saves: list[str] = []
    if kill is not None:
        marker = f"checkpoints/step_{kill.checkpoint:08d}/{COMMIT}"
        options |= {"kill_after": kill.after, "marker": marker}
        saves = [f"checkpoint.every_steps={kill.every_steps}", "checkpoint.every_minutes=0"]
    jsonl = {"_target_": "tpu_experiments.loggers.jsonl.JsonlLogger"}
    probe = {"_target_": "tpu_experiments.loggers.probe.Probe", "options": options}
    return [*saves, override_of("+logger", {"jsonl": jsonl, "probe": probe})]


def environment(config: Config) -> dict[str, str]:
    """Return this process's environment, with a fixed order of summation on the CPU."""
    values = dict(os.environ)
    if config.hw.runtime != "eager" and config.hw.device == "cpu":
        values["XLA_FLAGS"] = f"{values.get('XLA_FLAGS', '')} {ONE_ORDER}".strip()
    return values


def read_events(life: Life, file: Path) -> None:
    """Copy the probe's events into `life`."""
    events = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for event in events:
        if event["event"] == "start":
            life.resume_step = event["resume_step"]
        elif event["event"] == "rows":
            life.rows[event["step"]] = event["rows"]
        else:
            life.read[event["step"]] = event["loss"]
    queued = (event["time"] for event in events if event["event"] == "rows")
    arrived = (event["time"] for event in events if event["event"] == "read")
    life.first_step = min([*islice(queued, 1, 2), *islice(arrived, 1)], default=0.0)


def size_of_newest(checkpoints: str) -> int:
    """Return the bytes of the newest complete checkpoint by its commit record; 0 if there is none."""
    step = latest_step(checkpoints)
    if not step:
        return 0
    commit = json.loads(paths.read_text(paths.join(checkpoints, f"step_{step:08d}", COMMIT)))
    return sum(facts["bytes"] for facts in commit["files"].values())
