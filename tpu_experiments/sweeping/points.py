"""Points of a sweep: their overrides, names and commands."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpu_experiments.config.commands import command, override_of
from tpu_experiments.config.folders import COMMAND
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import PlanTaskConfig
from tpu_experiments.storage import paths
from tpu_experiments.storage.run_folder import RunFolder

SWEEPS = "sweeps"
MAX_NAME = 120  # characters; file systems allow 255 bytes, and a run's files append suffixes to the name
OF_THE_SWEEP = ("name=", "output_dir=", "sweep=", "sweeping.", "hydra.", "hydra/")


@dataclass(frozen=True)
class Point:
    """One combination of the swept values."""

    name: str
    changed: Mapping[str, str]
    """Value of each swept key, as on the command line."""
    overrides: tuple[str, ...]
    """Command line of this point, without the overrides that the sweep sets itself."""
    config: Config
    members: tuple[str, ...] = ()
    """Names of the points that train in one program, of which this is the plan; empty for a point of its own."""
    options: tuple[str, ...] = ()
    """Options of Hydra in front of the overrides: `--config-dir=` of the sweep's command line."""

    @property
    def folder(self) -> RunFolder:
        """Return the point's run folder."""
        return RunFolder(self.config.output_dir, self.name)


def point_name(overrides: Sequence[str]) -> str:
    """Return the overrides as a folder name, `lora.r=8,lora.alpha=16`.

    A name above 120 characters is cut and ends in a hash of the whole.
    """
    plain = re.sub(r"[\[\]{}'\" ]", "", ",".join(overrides))
    name = re.sub(r"[^A-Za-z0-9._+=,-]+", "-", plain).strip("._+=,-") or "base"
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - 9]}-{hashlib.sha256(plain.encode()).hexdigest()[:8]}"


def without_own(overrides: Sequence[str]) -> list[str]:
    """Return a point's overrides without those that the sweep sets itself."""
    return [o for o in overrides if not o.startswith(("name=", "output_dir="))]


def sweep_folder(output_dir: str, name: str) -> str:
    """Return `<output_dir>/sweeps/<name>`, the parent of the points' run folders."""
    return paths.join(output_dir, SWEEPS, name)


def command_of(point: Point, *, given: str) -> list[str]:
    """Return the point's command; `given` is the output_dir of the sweep's command line.

    `hydra.mode=RUN` is added, since a preset of conf/sweep would turn on multirun again.
    """
    words = [*COMMAND, *point.options, *member_overrides(point), "hydra.mode=RUN"]
    task = point.config.task
    if isinstance(task, PlanTaskConfig) and task.compiled_folder is None:
        words.append(override_of("task.compiled_folder", paths.join(given, "plans", "compiled")))
    return words


def member_overrides(point: Point) -> list[str]:
    """Return the command line of a point that trains in a pack, for `config_of`."""
    own = (override_of("name", point.name), override_of("output_dir", point.config.output_dir))
    return [*point.overrides, *own]


def pack_command(point: Point, *, folder: str) -> list[str]:
    """Return the command of the pack whose first point this is.

    Args:
        folder: its `PackFolder`.
    """
    own = [override for override in member_overrides(point) if not override.startswith("task=")]
    own += ["hydra.mode=RUN", "task=pack", override_of("task.points", folder)]
    return [*COMMAND, *point.options, *own]


def shown_command(overrides: Sequence[str], *, name: str) -> str:
    """Return the command that runs a point's settings on their own, for the user to type."""
    kept = [o for o in overrides if not o.startswith(OF_THE_SWEEP)]
    return command(*kept, override_of("name", name))
