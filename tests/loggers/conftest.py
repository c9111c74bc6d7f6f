"""A logger context over a fresh run folder, local or on memory://."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tpu_experiments.config.schema import Config
from tpu_experiments.loggers.base import LoggerContext
from tpu_experiments.storage.run_folder import open_run


@pytest.fixture
def make_context(make_config: Callable[..., Config], tmp_path: Path) -> Callable[..., LoggerContext]:
    """Context of a run that is new, or of its next start with `resume_step`."""

    def make(*words: str, output_dir: str | None = None, resume_step: int = 0, total_steps: int = 100) -> LoggerContext:
        config = make_config("name=x", *words, f"output_dir={output_dir or tmp_path}")
        folder = open_run(config)
        folder.create(config)
        return LoggerContext(run_folder=folder, config=config, total_steps=total_steps, resume_step=resume_step)

    return make
