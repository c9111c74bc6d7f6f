"""task=plan in this process, composed as run.py composes it, for what needs no compiler."""

import json
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig

from tests.config.composing import CONF, composition
from tests.jobs import of_tiny_job
from tpu_experiments.config.compose import to_config
from tpu_experiments.tasks.plan import run


def run_plan(*overrides: str) -> None:
    """Run the task; Hydra knows the overrides, as within run.py."""
    given = ["~local", "task=plan", *of_tiny_job(overrides)]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        HydraConfig.instance().set_config(compose("config", overrides=given, return_hydra_config=True))
        try:
            run(to_config(composition(given)))
        finally:
            HydraConfig.instance().cfg = None


def plan_fields(folder: Path, name: str) -> dict[str, Any]:
    """What plan.json holds."""
    fields: dict[str, Any] = json.loads((folder / "plans" / name / "plan.json").read_text())
    return fields
