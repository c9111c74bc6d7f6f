"""Derive the run from the words after `--`: its name, folder and arguments of run.py, and its plan before a rental."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import yaml

from launch.tpu_vm.code_sync import ROOT
from launch.tpu_vm.errors import LaunchError
from launch.tpu_vm.settings import Settings
from tpu_experiments.config.commands import override_of, typed


@dataclass(frozen=True)
class Job:
    """Arguments of run.py and where its results are written."""

    overrides: tuple[str, ...]
    name: str
    folder: str

    @property
    def is_remote(self) -> bool:
        """Return whether the results are written to a bucket."""
        return "://" in self.folder


def is_sweep(overrides: Sequence[str]) -> bool:
    """Return whether the overrides start a sweep, whose runs are written to `sweeps/<name>`."""
    if "hydra.mode=RUN" in overrides:
        return False
    preset = values_of(overrides).get("sweep", "null")
    return preset != "null" or any(word in ("-m", "--multirun", "hydra.mode=MULTIRUN") for word in overrides)


def is_grid(overrides: Sequence[str]) -> bool:
    """Return whether the command line lists all points; a sampler may add more than are recorded so far."""
    return not any(word.startswith(("sweep=", "hydra/sweeper")) for word in overrides)


def points_at_once(overrides: Sequence[str]) -> int:
    """Return how many points of a sweep share the machine."""
    given = values_of(overrides).get("sweeping.points_at_once", "1")
    return int(given) if given.isdecimal() else 1


def values_of(overrides: Sequence[str]) -> dict[str, str]:
    """Return the value of each override; the last one of a key wins."""
    return dict(word.split("=", 1) for word in overrides if "=" in word and not word.startswith("-"))


def job_of(overrides: list[str], settings: Settings, *, local_file: Path) -> Job:
    """Return the job with `hw`, `name` and `output_dir` made explicit.

    Args:
        local_file: conf/local/default.yaml, which is missing on the VM since git ignores it; its output_dir is applied.

    Raises:
        LaunchError: `hw=` differs from the rented slice, unless points run side by side, which name their chip.
    """
    given = values_of(overrides)
    if given.get("hw", settings.hw) != settings.hw and points_at_once(overrides) == 1:
        raise LaunchError(f"hw={settings.hw} is rented and after -- stands hw={given['hw']}; leave the second one out.")
    name = given.get("name") or settings.name
    output_dir = given.get("output_dir") or _local(local_file).get("output_dir") or "outputs"
    added = [f"hw={settings.hw}"] if "hw" not in given else []
    added += [f"name={name}"] if "name" not in given else []
    added += [override_of("output_dir", output_dir)] if "output_dir" not in given else []
    folder = f"{output_dir.rstrip('/')}/{'sweeps/' if is_sweep(overrides) else ''}{name}"
    return Job((*overrides, *added), name, folder)


def name_for(overrides: list[str], hw: str) -> str:
    """Return a default name, made of the experiment and the slice."""
    words = [word.split("=", 1)[1] for word in overrides if word.startswith("experiment=")]
    return f"{(words or ['run'])[-1].replace('_', '-').lower()}-{hw}"


def check_outlives(job: Job, settings: Settings, *, num_workers: int, is_new: bool) -> None:
    """Refuse jobs whose only copy of the results could be lost or that start from what no VM has, and sweeps on slices.

    Args:
        is_new: the machine is rented for this run, so that nothing of an earlier one is on its disk.

    Raises:
        LaunchError: a spot or multi-host machine without a remote `output_dir` or with a local `start.run`, or a
            multi-host sweep.
    """
    if is_sweep(job.overrides) and num_workers > 1:
        raise LaunchError(
            f"hw={settings.hw} with a sweep; each of its {num_workers} VMs would run all of it into one folder; use "
            "one host, as hw=v6e8."
        )
    is_new_disk = settings.spot or num_workers > 1
    start = values_of(job.overrides).get("start.run", "")
    if (is_new or is_new_disk) and start.startswith(f"{settings.results.rstrip('/')}/"):
        copy = shlex.join(["gcloud", "storage", "cp", "--recursive", start, "gs://bucket/runs/"])
        there = typed(override_of("start.run", f"gs://bucket/runs/{Path(start).name}"))
        raise LaunchError(
            f"start.run={start}; it is a folder of this machine, and the VM has none of it; copy it ({copy}) and give "
            f"{there}."
        )
    if job.is_remote:
        return
    if is_new_disk:
        why = (
            "spot machine is taken away with its disk" if settings.spot else "slice of several VMs has a disk for each"
        )
        raise LaunchError(
            f"output_dir={values_of(job.overrides)['output_dir']}; a {why}; give output_dir=gs://bucket/runs after --."
        )


def _local(file: Path) -> dict[str, str]:
    if not file.is_file():
        return {}
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {key: str(value) for key, value in content.items()} if isinstance(content, dict) else {}


@dataclass(frozen=True)
class Estimate:
    """Estimate read from plan.json."""

    fits: bool
    hours: float | None
    usd: float | None
    """Cost at the requested price, spot or on demand; None where a length or a price is unknown."""
    method: str

    @property
    def sentence(self) -> str:
        """Return the estimate as a sentence to show before the confirmation."""
        if self.hours is None:
            return f"planned ({self.method}): it fits; how long it takes is not known (plan.md says why)"
        money = "" if self.usd is None else f", ${self.usd:.2f}"
        return f"planned ({self.method}): it fits, {self.hours:.1f} h{money}"


class Planner(Protocol):
    """Protocol that plans a run before anything is rented; None where nothing was planned."""

    def __call__(self, overrides: tuple[str, ...], *, run_name: str, spot: bool, results: Path) -> Estimate | None:
        """Return the estimate of the run."""


def plan_words(overrides: tuple[str, ...], *, results: Path) -> list[str]:
    """Return the command that plans the run locally; a sweep's plans are kept apart from its results."""
    kept = [word for word in overrides if not word.startswith(("output_dir=", "task="))]
    folder = results / "plans" if is_sweep(overrides) else results
    return [sys.executable, str(ROOT / "run.py"), "task=plan", *kept, override_of("output_dir", str(folder))]


def estimated(overrides: tuple[str, ...], *, run_name: str, spot: bool, results: Path) -> Estimate:
    """Plan in a child process, since a plan imports torch, which the launcher must not.

    Raises:
        LaunchError: planning failed, or the run does not fit.
    """
    folder = results / "plans" / run_name
    if is_sweep(overrides):
        folder = results / "plans" / "sweeps" / run_name
        shutil.rmtree(folder, ignore_errors=True)
    (folder / "plan.json").unlink(missing_ok=True)
    code = subprocess.call(plan_words(overrides, results=results), cwd=ROOT)
    files = sorted(folder.glob("plans/*/plan.json") if is_sweep(overrides) else folder.glob("plan.json"))
    if code or not files:
        raise LaunchError(
            f"plan=first; the plan ended with exit code {code} and says why above; mend it, plan on Linux "
            f"(bash launch/local.sh python launch/tpu.py ...), or rent without one: plan=skip."
        )
    found = [_read(file, spot=spot) for file in files]
    return found[0] if not is_sweep(overrides) else _together(found, at_once=points_at_once(overrides))


def _read(file: Path, *, spot: bool) -> Estimate:
    content = json.loads(file.read_text(encoding="utf-8"))
    usd = (content.get("usd") or {}).get("spot" if spot else "on_demand")
    found = Estimate(bool(content.get("fits")), content.get("hours"), usd, str(content.get("method")))
    if not found.fits:
        raise LaunchError(
            f"plan=first; the run does not fit; {file.with_suffix('.md')} has what would; nothing was rented."
        )
    return found


def _together(points: list[Estimate], *, at_once: int) -> Estimate:
    """Sum the plans of a sweep's points; no price, since the points may share the machine."""
    hours = [point.hours for point in points if point.hours is not None]
    whole = sum(hours) / at_once if len(hours) == len(points) else None
    return Estimate(True, whole, None, f"{points[0].method}, {len(points)} points")
