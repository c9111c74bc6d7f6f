"""Derive the run from the words after `--`: its name, its folder and the VM's arguments to run.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from launch.tpu_vm.errors import LaunchError
from launch.tpu_vm.settings import Settings


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
    added += [f"output_dir={output_dir}"] if "output_dir" not in given else []
    folder = f"{output_dir.rstrip('/')}/{'sweeps/' if is_sweep(overrides) else ''}{name}"
    return Job((*overrides, *added), name, folder)


def name_for(overrides: list[str], hw: str) -> str:
    """Return a default name, made of the experiment and the slice."""
    words = [word.split("=", 1)[1] for word in overrides if word.startswith("experiment=")]
    return f"{(words or ['run'])[-1].replace('_', '-').lower()}-{hw}"


def check_outlives(job: Job, settings: Settings, *, num_workers: int) -> None:
    """Refuse jobs whose only copy of the results could be lost, and sweeps on several hosts.

    Raises:
        LaunchError: a spot or multi-host machine without a remote `output_dir`, or a multi-host sweep.
    """
    if is_sweep(job.overrides) and num_workers > 1:
        raise LaunchError(
            f"hw={settings.hw} with a sweep; each of its {num_workers} VMs would run all of it into one folder; use "
            "one host, as hw=v6e8."
        )
    if job.is_remote:
        return
    if settings.spot or num_workers > 1:
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
