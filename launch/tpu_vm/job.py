"""From the words after `--` to the run: its name, its folder, and what run.py is given on the VM."""

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


def job_of(overrides: list[str], settings: Settings, *, local_file: Path) -> Job:
    """The job with `hw`, `name` and `output_dir` written out.

    Args:
        local_file: conf/local/default.yaml, which the VM lacks, since git ignores it; its output_dir holds there too.

    Raises:
        LaunchError: `hw=` says something else than the slice that is rented.
    """
    given = dict(word.split("=", 1) for word in overrides if "=" in word and not word.startswith("-"))
    if given.get("hw", settings.hw) != settings.hw:
        raise LaunchError(f"hw={settings.hw} is rented and after -- stands hw={given['hw']}; leave the second one out.")
    name = given.get("name") or settings.name
    output_dir = given.get("output_dir") or _local(local_file).get("output_dir") or "outputs"
    added = [f"hw={settings.hw}"] if "hw" not in given else []
    added += [f"name={name}"] if "name" not in given else []
    added += [f"output_dir={output_dir}"] if "output_dir" not in given else []
    return Job((*overrides, *added), name, f"{output_dir.rstrip('/')}/{name}")


def name_for(overrides: list[str], hw: str) -> str:
    """A name where none was given: the experiment's and the slice's."""
    words = [word.split("=", 1)[1] for word in overrides if word.startswith("experiment=")]
    return f"{(words or ['run'])[-1].replace('_', '-').lower()}-{hw}"


def check_outlives(job: Job, settings: Settings, *, num_workers: int) -> None:
    """A machine that can be taken away, or that deletes itself, must not hold the only copy.

    Raises:
        LaunchError
    """
    if job.is_remote:
        return
    if settings.spot or num_workers > 1:
        why = (
            "spot machine is taken away with its disk" if settings.spot else "slice of several VMs has a disk for each"
        )
        raise LaunchError(
            f"output_dir={job.folder.rsplit('/', 1)[0]}; a {why}; give output_dir=gs://bucket/folder after --."
        )


def _local(file: Path) -> dict[str, str]:
    if not file.is_file():
        return {}
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {key: str(value) for key, value in content.items()} if isinstance(content, dict) else {}
