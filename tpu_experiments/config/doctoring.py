"""Schema of the settings of task=doctor."""

from dataclasses import dataclass, field

from tpu_experiments.config.errors import suggest
from tpu_experiments.config.fields import number
from tpu_experiments.config.places import place
from tpu_experiments.config.planning import TaskConfig

CHECKS = (
    "settings",
    "versions",
    "variables",
    "runtime_version",
    "lock_file",
    "devices",
    "chip_memory",
    "host_memory",
    "disk",
    "compile_cache",
    "output_dir",
    "run",
    "model",
    "data",
    "cloud",
)
"""In the order of the report."""


@dataclass
class DoctorTaskConfig(TaskConfig):
    """Settings of task=doctor."""

    checks: list[str] = field(default_factory=list)
    """Names of the checks that are made; empty makes all of them."""
    json: str | None = place("file", default=None)
    """JSON file that is written as well, local or gs://."""
    timeout_seconds: float = number(default=20.0, above=0)
    """Longest wait for an answer of storage, the Hub or gcloud; all of them are asked at once."""
    device_timeout_seconds: float = number(default=120.0, above=0)
    """Longest wait for the child process that starts the devices, counts them and adds two numbers."""


def doctoring_problems(task: TaskConfig) -> list[str]:
    """Return invalid settings of task=doctor; none for another task."""
    if not isinstance(task, DoctorTaskConfig):
        return []
    problems = [
        f"task.checks has {name!r}; there is no such check. {suggest(name, CHECKS)}"
        for name in task.checks
        if name not in CHECKS
    ]
    if task.json is not None and not task.json.endswith(".json"):
        problems.append(f"task.json={task.json}; it does not end in .json; name it so.")
    return problems
