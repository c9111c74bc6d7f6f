"""Schema of the settings of task=report."""

from dataclasses import dataclass, field

from tpu_experiments.config.planning import TaskConfig


@dataclass
class ReportTaskConfig(TaskConfig):
    """Settings of task=report."""

    runs: list[str] = field(default_factory=list, metadata={"place": "folder"})
    """Run folders, folders of runs such as a sweep's, or patterns of either (`outputs/tiny_*`), local or URLs; empty
    takes every run in `output_dir`."""
    baseline: str | None = None
    """Name of the run that the others are compared with; null takes the first."""
