"""From the words after `--` to the run: its name, its folder, and what run.py is given on the VM."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from launch.tpu_vm.errors import LaunchError
from launch.tpu_vm.settings import Settings


@dataclass(frozen=True)
class Job:
    """What run.py is given, and where its results will lie."""

    overrides: tuple[str, ...]
    name: str
    folder: str

    @property
    def is_remote(self) -> bool:
        """Whether a bucket has the results."""
        return "://" in self.folder


def is_sweep(overrides: Sequence[str]) -> bool:
    """Whether run.py makes several runs of it, which lie in a folder `sweeps/<name>`."""
    if "hydra.mode=RUN" in overrides:
        return False
    preset = values_of(overrides).get("sweep", "null")
    return preset != "null" or any(word in ("-m", "--multirun", "hydra.mode=MULTIRUN") for word in overrides)


def is_grid(overrides: Sequence[str]) -> bool:
    """Whether the command line says all points of a sweep; a sampler may want more than those that are written down."""
    return not any(word.startswith(("sweep=", "hydra/sweeper")) for word in overrides)


def points_at_once(overrides: Sequence[str]) -> int:
    """Points of a sweep that share the machine."""
    given = values_of(overrides).get("sweeping.points_at_once", "1")
    return int(given) if given.isdecimal() else 1


def values_of(overrides: Sequence[str]) -> dict[str, str]:
    """Values of the overrides, the last of a key."""
    return dict(word.split("=", 1) for word in overrides if "=" in word and not word.startswith("-"))


def job_of(overrides: list[str], settings: Settings, *, local_file: Path) -> Job:
    """The job with `hw`, `name` and `output_dir` written out.

    Args:
        local_file: conf/local/default.yaml, which the VM lacks, since git ignores it; its output_dir holds there too.

    Raises:
        LaunchError: `hw=` says something else than the slice that is rented; points side by side name their chip.
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
    """A name where none was given: the experiment's and the slice's."""
    words = [word.split("=", 1)[1] for word in overrides if word.startswith("experiment=")]
    return f"{(words or ['run'])[-1].replace('_', '-').lower()}-{hw}"


def check_outlives(job: Job, settings: Settings, *, num_workers: int) -> None:
    """A machine that can be taken away, or that deletes itself, must not hold the only copy; a sweep is of one host.

    Raises:
        LaunchError
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
