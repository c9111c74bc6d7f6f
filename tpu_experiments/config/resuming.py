"""Schema of the settings of task=resume_check."""

from dataclasses import dataclass

from tpu_experiments.config.fields import number
from tpu_experiments.config.planning import TaskConfig


@dataclass
class ResumeCheckTaskConfig(TaskConfig):
    """Settings of task=resume_check."""

    steps: int = number(at_least=4)
    """Optimizer steps that every stage of the curriculum is cut to, as `trainer.max_stage_steps` does; a stage that is
    shorter, or that `trainer.max_stage_steps` ends before, keeps its length."""
