"""task=resume_check: this config, killed and resumed, beside the same config left alone.

Every stage is cut to `task.steps`; all else is the user's own. The children are run.py itself. What they write, and the
verdict, lies in `<output_dir>/resume_check/<name>`.
"""

import logging
import sys
import tempfile
from copy import deepcopy
from pathlib import Path

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.resuming import ResumeCheckTaskConfig
from tpu_experiments.config.schema import Config
from tpu_experiments.io import paths, strict_json
from tpu_experiments.logging.runlog import start_run_log, stop_run_log
from tpu_experiments.tasks.resume_check.children import KILLED, WHOLE, Children, Kill, Life
from tpu_experiments.tasks.resume_check.compare import Verdict, compare
from tpu_experiments.tasks.resume_check.report import as_json, as_text
from tpu_experiments.tasks.setup import check_model, make_inputs
from tpu_experiments.training.inputs import num_steps

log = logging.getLogger(__name__)
MIN_STEPS = 4
"""A checkpoint after two steps, a step that is lost, and one that was not reached."""


def run(config: Config) -> None:
    """Print the verdict and the cost of a resume, write resume_check.json; exit code 0 equal, 1 not.

    Raises:
        ConfigError: the check cannot be made.
    """
    if config.output_dir.startswith("memory://"):
        raise ConfigError(
            f"output_dir={config.output_dir}; task=resume_check runs in processes of its own, and memory:// belongs to "
            "one process; use a local folder or gs://."
        )
    start_run_log(None, rank=0)
    try:
        config = shortened(config)
        check_model(config)
        kills = plan_kills(config)
        place = clear_place(config)
        with tempfile.TemporaryDirectory(prefix="resume_check_") as witness:
            children = Children(config, place=place, witness=Path(witness), every_steps=kills[0].checkpoint)
            lives = [children.live(WHOLE)]
            lives += [children.live(KILLED, kill=kill) for kill in kills]
            lives.append(children.live(KILLED))
    finally:
        stop_run_log()
    verdict = compare(lives, place=place)
    write_verdict(place, verdict, lives)
    print(as_text(verdict, lives, place=place))
    if not verdict.is_equal:
        sys.exit(1)


def shortened(config: Config) -> Config:
    """The config with every stage cut to `task.steps`."""
    assert isinstance(config.task, ResumeCheckTaskConfig)
    steps, config = config.task.steps, deepcopy(config)
    config.trainer.max_stage_steps = min(steps, config.trainer.max_stage_steps or steps)
    return config


def plan_kills(config: Config) -> list[Kill]:
    """Inside the first stage, between two checkpoints; and behind the border to the second, where there is one.

    Raises:
        ConfigError: the first stage is too short for a kill between two checkpoints.
    """
    inputs = make_inputs(config)
    steps = [num_steps(inputs, stage, config=config) for stage in inputs.stages]
    name, first = inputs.stages[0].name, steps[0]
    if first < MIN_STEPS:
        raise ConfigError(
            f"task=resume_check; stage {name} has {first} steps here (trainer.max_stage_steps, "
            f"curriculum.stages.{name}.steps or .epochs), and a kill between two checkpoints takes {MIN_STEPS}; "
            "give it more."
        )
    half = first // 2
    kills = [Kill(checkpoint=half, after=half + 1, where=f"inside stage {name}")]
    if len(steps) > 1:
        where = f"behind the border to stage {inputs.stages[1].name}"
        kills.append(Kill(checkpoint=first, after=first + 1, where=where))
    return kills


def clear_place(config: Config) -> str:
    """The folder of this check, without what an earlier check of the same name left.

    Raises:
        ConfigError: something else lies there.
    """
    place = paths.join(config.output_dir, "resume_check", str(config.name))
    ours = {WHOLE, KILLED, "resume_check.json"}
    other = [name for name in paths.list_names(place) if name not in ours and not name.startswith(".")]
    if other:
        raise ConfigError(f"name={config.name}; {place} holds {', '.join(other)}, which no check wrote; move it away.")
    for name in ours:
        paths.remove_tree(paths.join(place, name))
    paths.make_dirs(place)
    return place


def write_verdict(place: str, verdict: Verdict, lives: list[Life]) -> None:
    """resume_check.json."""
    text = strict_json.dumps(as_json(verdict, lives), indent=1)
    paths.write_text_atomic(paths.join(place, "resume_check.json"), text + "\n")
