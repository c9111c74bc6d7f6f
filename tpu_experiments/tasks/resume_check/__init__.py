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
from tpu_experiments.tasks.resume_check.children import (
    KILLED,
    LOG_EVERY_STEPS,
    WHOLE,
    Children,
    Kill,
    Life,
    LifeFailed,
)
from tpu_experiments.tasks.resume_check.compare import Verdict, compare
from tpu_experiments.tasks.resume_check.report import as_json, as_text
from tpu_experiments.tasks.settling import settled_run
from tpu_experiments.tasks.setup import check_model, make_inputs
from tpu_experiments.training.inputs import num_steps

log = logging.getLogger(__name__)
MIN_STEPS = 4
"""Two saves, a step that is lost, then a save in front, another step that is lost and no other save."""


def run(config: Config) -> None:
    """Print the verdict and the cost of a resume, write resume_check.json; exit code 0 equal, 1 not.

    A child that fails is no verdict, and exit code 1 as well.

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
        config = settled_run(shortened(config))
        check_model(config)
        kills = plan_kills(config)
        place = clear_place(config)
        with tempfile.TemporaryDirectory(prefix="resume_check_") as witness:
            children = Children(config, place=place, witness=Path(witness))
            lives = [children.live(WHOLE)]
            lives += [children.live(KILLED, kill=kill) for kill in kills]
            lives.append(children.live(KILLED))
    except LifeFailed as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
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
    """Choose the kills: two inside the first stage, one behind the border to the second, where there is one.

    Raises:
        ConfigError: the first stage is too short for these kills.
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
    kills = kills_inside(first, where=f"inside stage {name}")
    if len(steps) > 1:
        where = f"behind the border to stage {inputs.stages[1].name}"
        kills.append(Kill(first, after=first + 1, where=where, every_steps=0))
    return kills


def kills_inside(num_steps: int, *, where: str) -> list[Kill]:
    """Choose a kill behind a save in the background, and one behind a save in front of the loop.

    Which saves are in front says training/saving.py: the first by steps of a life, here one from the start and one that
    goes on from the other kill. Each kill comes at the first log record after its checkpoint, so that a step that is
    done and a record that is written are lost, and before the next save. The checkpoint of the one in the background
    lies inside the window of a log record, whose losses it must hold.

    Args:
        num_steps: of the stage, `MIN_STEPS` at least.
    """
    every = num_steps // 2 - 1
    every -= every % LOG_EVERY_STEPS == 0  # else the second save is at the end of a window
    second = 2 * every
    return [
        Kill(second, after=second + 1, where=where, every_steps=every, is_second_save=True),
        Kill(second + 1, after=second + 2, where=where, every_steps=second + 1),
    ]


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
