"""task=resume_check: compare a run that is killed and resumed with the same run left uninterrupted.

Every stage is cut to `task.steps`; everything else is the user's own config. The child processes run run.py itself.
Their output and the verdict are written to `<output_dir>/resume_check/<name>`.
"""

import sys
import tempfile
from copy import deepcopy
from pathlib import Path

from tpu_experiments.config.curriculum import Stage
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import ResumeCheckTaskConfig
from tpu_experiments.loggers.runlog import start_run_log, stop_run_log
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.tasks.open_settings import with_open_settings
from tpu_experiments.tasks.resume_check.children import KILLED, LOG_EVERY_STEPS, WHOLE, Children, Kill, Life, LifeFailed
from tpu_experiments.tasks.resume_check.compare import Verdict, compare
from tpu_experiments.tasks.resume_check.report import as_json, as_text
from tpu_experiments.tasks.setup import check_model, make_inputs
from tpu_experiments.training.batches import num_steps, stages_with_data

MIN_STEPS = 4
"""Two saves and a lost step, then a blocking save, another lost step and no other save."""


def run(config: Config) -> None:
    """Print the verdict and the cost of a resume, write resume_check.json; exit code 0 equal, 1 not.

    A child that fails gives no verdict, and exit code 1 as well.

    Raises:
        ConfigError: the check cannot be run.
    """
    if config.output_dir.startswith("memory://"):
        raise ConfigError(
            f"output_dir={config.output_dir}; task=resume_check runs in processes of its own, and memory:// belongs to "
            "one process; use a local folder or gs://."
        )
    start_run_log(None, rank=0)
    try:
        config = with_open_settings(shortened(config))
        stages = stages_with_data(config)
        check_model(config, stages)
        kills = plan_kills(config, stages)
        place = clear_place(config)
        with tempfile.TemporaryDirectory(prefix="resume_check_") as witness:
            children = Children(config, place=place, witness=Path(witness))
            lives = [children.run_process(WHOLE)]
            lives += [children.run_process(KILLED, kill=kill) for kill in kills]
            lives.append(children.run_process(KILLED))
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
    """Return the config with every stage cut to `task.steps`."""
    assert isinstance(config.task, ResumeCheckTaskConfig)
    steps, config = config.task.steps, deepcopy(config)
    config.trainer.max_stage_steps = min(steps, config.trainer.max_stage_steps or steps)
    return config


def plan_kills(config: Config, stages: list[Stage]) -> list[Kill]:
    """Choose the kills: two in the first stage, and, if there is a second, one after its start and one inside it.

    The last resumes in mid-stage what begins with the stage: a fresh optimizer, a schedule, trained parts.

    Raises:
        ConfigError: the first stage is too short for these kills.
    """
    inputs = make_inputs(config, stages)
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
        if steps[1] >= 2 * LOG_EVERY_STEPS:  # a record comes between its save and the stage's end
            saved, where = first + 2, f"inside stage {inputs.stages[1].name}"
            kills.append(Kill(saved, after=saved + 1, where=where, every_steps=saved))
    return kills


def kills_inside(num_steps: int, *, where: str) -> list[Kill]:
    """Choose a kill after a background save, and one after a save that blocks the training loop.

    Blocking saves are those of checkpoint/saver.py: the first by steps after a start, here a fresh start and a resume
    from the other kill. Each kill comes at the first log record after its checkpoint and before the next save, so that
    a completed step and a written record are lost. The background checkpoint falls inside the window of a log record,
    whose losses it must hold.

    Args:
        num_steps: of the stage, at least `MIN_STEPS`.
    """
    every = num_steps // 2 - 1
    every -= every % LOG_EVERY_STEPS == 0  # otherwise the second save would fall on the end of a window
    second = 2 * every
    return [
        Kill(second, after=second + 1, where=where, every_steps=every, is_second_save=True),
        Kill(second + 1, after=second + 2, where=where, every_steps=second + 1),
    ]


def clear_place(config: Config) -> str:
    """Return the folder of this check, cleared of an earlier check of the same name.

    Raises:
        ConfigError: it holds other files.
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
    """Write resume_check.json."""
    text = strict_json.dumps(as_json(verdict, lives), indent=1)
    paths.write_text_atomic(paths.join(place, "resume_check.json"), text + "\n")
