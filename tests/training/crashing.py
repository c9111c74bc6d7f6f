"""A run killed with SIGKILL at drawn instants until it is done, for the crash tests and their benchmark."""

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import forks
from tests.training.runs import SAME_SUMS

EVERY = 2
"""Steps between two checkpoints; log records are of three steps, so that checkpoints cut them."""
TWO_STAGES = (
    "model=qwen05b",
    "data=[sample_text,sample_chat]",
    "lora=all_linear_r8",
    "lora.dropout=0.1",
    "lora.alpha=256",
    "debug=smoke",
    "trainer.max_stage_steps=8",
    "trainer.log_every_steps=3",
    "trainer.eval_every_steps=5",
    "trainer.max_eval_rows=8",
    "sample.max_new_tokens=0",
    f"checkpoint.every_steps={EVERY}",
    "name=run",
)


Life = forks.Process | subprocess.Popen[bytes]
"""A running command: a fork, or a process of another environment."""


@dataclass
class Death:
    """One life that ended in a kill."""

    kind: str
    """`instant`, drawn from the wall time of a whole run, `save`, while a checkpoint was being written, or the line of
    the output after which it came."""
    seconds: float
    """From the start of the process."""
    done: int
    """Last step that was queued; 0 where none was."""
    is_torn: bool
    """A checkpoint folder without its commit record was left."""
    stack: tuple[str, ...] = ()
    """`file.function` of the main thread, the innermost first; only where the run asks for it."""


@dataclass
class Run:
    """One run folder, or those of a sweep's points, and its lives."""

    folder: Path
    overrides: tuple[str, ...]
    sweep: tuple[str, ...] = ()
    """Words of a sweep, whose points notice no events; none of one run."""
    notes_stack: bool = False
    """Whether a life that is killed says before where it was; it must be a fork."""
    deaths: list[Death] = field(default_factory=list)
    resumes: list[tuple[int, int]] = field(default_factory=list)
    """(step that a life went on from, steps it repeated)."""

    def start(self, *overrides: str, kill_after: int | None = None, python: Path | None = None) -> Life:
        """One more life; it kills itself at the record of step `kill_after` or the next.

        Args:
            python: interpreter of another environment.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        options = f"path: '{self.events}', kill_after: {'null' if kill_after is None else kill_after}"
        probe = f"+logger={{probe: {{_target_: tpu_experiments.loggers.probe.Probe, options: {{{options}}}}}}}"
        first, last = (["-m", *self.sweep], []) if self.sweep else ([], [probe])
        given = [*first, *TWO_STAGES, *self.overrides, *overrides, f"output_dir={self.folder}", *last]
        kept = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "CPU_NUM_DEVICES")}
        with (self.folder / "output").open("ab") as output:
            if python is not None:
                command = [str(python), "run.py", *given]
                return subprocess.Popen(command, cwd=forks.REPOSITORY, env=kept, stdout=output, stderr=output)
            return forks.start(["run.py", *given], env=kept | SAME_SUMS, stdout=output, stderr=output)

    def die_after(self, step: int, *overrides: str) -> None:
        """A life that kills itself at the record of that step."""
        code = self.start(*overrides, kill_after=step).wait(timeout=600)
        assert code == -signal.SIGKILL, (self.folder / "output").read_text()[-4000:]

    def finish(self, *overrides: str, python: Path | None = None) -> float:
        """A life to the end; its seconds."""
        started = time.monotonic()
        code = self.start(*overrides, python=python).wait(timeout=600)
        assert code == 0, (self.folder / "output").read_text()[-4000:]
        self.note_resumes()
        return time.monotonic() - started

    def kill_at(self, seconds: float) -> bool:
        """A life of that many seconds; False when it was done before."""
        started, process = time.monotonic(), self.start()
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return self._kill(process, "instant", started)
        return self._is_done(process)

    def kill_in_save(self, number: int, *, delay: float) -> bool:
        """A life until its `number`-th checkpoint folder has been there for `delay` seconds without a commit record."""
        started, process, seen = time.monotonic(), self.start(), set(self.torn)
        while process.poll() is None:
            new = {name for name in self.torn if name not in seen}
            seen |= new
            number -= len(new)
            if new and number <= 0:
                time.sleep(delay)
                return self._kill(process, "save", started)
            time.sleep(0.0005)
        return self._is_done(process)

    def kill_after_line(self, text: str, *, delay: float) -> bool:
        """A life until `delay` seconds after its output has `text`; False when it was done before."""
        started, process, output = time.monotonic(), self.start(), self.folder / "output"
        begun = output.stat().st_size
        while process.poll() is None:
            if text.encode() in output.read_bytes()[begun:]:
                time.sleep(delay)
                return self._kill(process, text, started) if process.poll() is None else self._is_done(process)
            time.sleep(0.01)
        return self._is_done(process)

    def _kill(self, process: Life, kind: str, started: float) -> bool:
        seconds = time.monotonic() - started
        stack = self._stack(process) if self.notes_stack else ()
        process.kill()
        process.wait()
        queued = [event["step"] for event in self.lives[-1] if event["event"] == "rows"] if self.lives else []
        self.deaths.append(Death(kind, seconds, max(queued, default=0), bool(self.torn), stack))
        return True

    def _stack(self, process: Life) -> tuple[str, ...]:
        """Have the process write its stack, and return what it has within a second."""
        begun, until = (self.folder / "output").stat().st_size, time.monotonic() + 1
        process.send_signal(signal.SIGUSR2)
        while not (found := main_stack((self.folder / "output").read_bytes()[begun:].decode(errors="replace"))):
            if process.poll() is not None or time.monotonic() > until:
                break
            time.sleep(0.001)
        return found

    def _is_done(self, process: Life) -> bool:
        assert process.returncode == 0, (self.folder / "output").read_text()[-4000:]
        return False

    @property
    def events(self) -> Path:
        return self.folder / "events"

    @property
    def torn(self) -> list[str]:
        """Checkpoint folders without a commit record."""
        folders = [folder for place in self.places for folder in (place / "checkpoints").glob("step_*")]
        return [str(folder) for folder in folders if not (folder / "COMMIT.json").exists()]

    @property
    def places(self) -> list[Path]:
        """Folders of its runs."""
        if not self.sweep:
            return [self.folder / "run"]
        return sorted(path.parent for path in (self.folder / "sweeps" / "run").glob("*/config.yaml"))

    @property
    def lives(self) -> list[list[dict[str, Any]]]:
        """Events of each life that came as far as its loggers; a torn last line is left out."""
        lives: list[list[dict[str, Any]]] = []
        text = self.events.read_text() if self.events.exists() else ""
        for line in text.split("\n")[:-1]:
            event = json.loads(line)
            if event["event"] == "start":
                lives.append([])
            lives[-1].append(event)
        return lives

    def note_resumes(self) -> None:
        """From which step each life went on, and how many steps that had been queued before it did again."""
        done, self.resumes = 0, []
        for life in self.lives:
            if done:
                self.resumes.append((life[0]["resume_step"], max(0, done - life[0]["resume_step"])))
            done = max([done, *(event["step"] for event in life if event["event"] == "rows")])

    @property
    def rows(self) -> dict[int, list[list[str]]]:
        """Rows of every step, once for each life that did it."""
        rows: dict[int, list[list[str]]] = {}
        for event in (event for life in self.lives for event in life if event["event"] == "rows"):
            rows.setdefault(event["step"], []).append(event["rows"])
        return rows

    @property
    def records(self) -> list[dict[str, Any]]:
        """metrics.jsonl: steps and what does not depend on a clock."""
        lines = [line for place in self.places for line in (place / "metrics.jsonl").read_text().splitlines()]
        kept = ("step", "train/", "eval/", "norms/", "sample")
        return [{k: v for k, v in json.loads(line).items() if k.startswith(kept)} for line in lines]

    @property
    def adapter(self) -> list[str]:
        """SHA-256 of each adapter."""
        files = [place / "adapter" / "adapter_model.safetensors" for place in self.places]
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]

    @property
    def optimizer(self) -> list[bytes]:
        """Optimizer state of each last checkpoint."""
        folders = [max((place / "checkpoints").glob("step_*")) for place in self.places]
        return [(folder / "optimizer.safetensors").read_bytes() for folder in folders]


def main_stack(text: str) -> tuple[str, ...]:
    """Return `file.function` of the main thread, the innermost first, of what faulthandler wrote."""
    threads = [re.findall(r'File "[^"]*?(\w+)\.py", line \d+ in (\S+)', part) for part in text.split("hread 0x")]
    return next((tuple(map(".".join, own)) for own in threads if ("forks", "<module>") in own), ())


def require_equal(killed: Run, whole: Run) -> None:
    """Every record, row and byte of a run that was killed, and that nothing before its last checkpoint was repeated."""
    assert killed.records == whole.records
    assert killed.adapter == whole.adapter
    assert killed.optimizer == whole.optimizer
    once = {step: rows for step, (rows,) in whole.rows.items()}
    assert {step: rows for step, rows in killed.rows.items() if any(r != once[step] for r in rows)} == {}
    assert killed.rows.keys() == once.keys()
    # A save that is under way when the kill comes does not count, and costs its interval too.
    assert all(repeated <= 2 * EVERY for _, repeated in killed.resumes), killed.resumes


def crash(killed: Run, rng: random.Random, *, wall: float, num_kills: int, share_in_saves: float = 0.5) -> None:
    """At most `num_kills` lives that are killed, then one to the end; `wall` is the time of a whole run."""
    for _ in range(num_kills):
        if rng.random() < share_in_saves:
            was_killed = killed.kill_in_save(rng.randint(1, 3), delay=rng.random() * 0.01)
        else:
            was_killed = killed.kill_at(rng.random() * wall)
        if not was_killed:
            break
    killed.finish()
