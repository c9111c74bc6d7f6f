"""The points of a sweep: what each changes, what it is called, and the command that runs it."""

import hashlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpu_experiments.config.planning import PlanTaskConfig
from tpu_experiments.config.schema import Config
from tpu_experiments.io import paths
from tpu_experiments.io.folder import RunFolder

RUN = Path(__file__).parents[2] / "run.py"
SWEEPS = "sweeps"
MAX_NAME = 120  # characters; a file system takes 255 bytes, and files of a run hang more on it
OF_THE_SWEEP = ("name=", "output_dir=", "sweep=", "sweeping.", "hydra.", "hydra/")


@dataclass(frozen=True)
class Point:
    """One combination of the swept values."""

    name: str
    changed: Mapping[str, str]
    """Swept key to its value here, as on the command line."""
    overrides: tuple[str, ...]
    """All of the command line for this point, without what the sweep gives itself."""
    config: Config

    @property
    def folder(self) -> RunFolder:
        """Where it runs."""
        return RunFolder(self.config.output_dir, self.name)


def point_name(overrides: Sequence[str]) -> str:
    """The overrides as the name of a folder: `lora.r=8,lora.alpha=16`; a long one ends in a hash of the whole."""
    plain = re.sub(r"[\[\]{}'\" ]", "", ",".join(overrides))
    name = re.sub(r"[^A-Za-z0-9._+=,-]+", "-", plain).strip("._+=,-") or "base"
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - 9]}-{hashlib.sha256(plain.encode()).hexdigest()[:8]}"


def without_own(overrides: Sequence[str]) -> list[str]:
    """The overrides of a point without those that the sweep gives itself."""
    return [o for o in overrides if not o.startswith(("name=", "output_dir="))]


def sweep_folder(output_dir: str, name: str) -> str:
    """`<output_dir>/sweeps/<name>`, which holds a run folder per point."""
    return paths.join(output_dir, SWEEPS, name)


def command_of(point: Point, *, given: str) -> list[str]:
    """The child's command; `given` is the output_dir of the sweep's command line.

    A preset of conf/sweep turns multirun on, and the child is one run.
    """
    command = [sys.executable, str(RUN), *point.overrides, f"name='{point.name}'"]
    command += [f"output_dir='{point.config.output_dir}'", "hydra.mode=RUN"]
    task = point.config.task
    if isinstance(task, PlanTaskConfig) and task.compiled_folder is None:
        command.append(f"task.compiled_folder='{paths.join(given, 'plans', 'compiled')}'")
    return command


def shown_command(overrides: Sequence[str], *, name: str) -> str:
    """What a person types to run a point's settings on their own."""
    kept = [o for o in overrides if not o.startswith(OF_THE_SWEEP)]
    return " ".join(["python run.py", *(shlex.quote(o) for o in kept), f"name={name}"])
