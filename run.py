"""The one entry point: compose and check the config, set the environment, then run the task.

Nothing here or in tpu_experiments/config imports torch: torch_xla fixes its flags when it is imported.
"""

import importlib
import json
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors arrive here as exceptions, to become one sentence

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.help import help_text
from tpu_experiments.config.load import require_single_choices, to_config
from tpu_experiments.config.overlay import overlay_file, with_overlay
from tpu_experiments.config.planning import PlanTaskConfig
from tpu_experiments.config.refusals import null_group, sentence, unreadable_yaml
from tpu_experiments.config.schema import Config, register
from tpu_experiments.io import paths
from tpu_experiments.runtime.child import Relay
from tpu_experiments.runtime.env import prepare_environment
from tpu_experiments.training.stop import STOPPED_EXIT_CODE

register()
RELAY = Relay()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(composed: DictConfig) -> float | None:
    """Check the composed config and run it."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        remove_leftover(Path(HydraConfig.get().sweep.dir))
    try:
        require_single_choices(HydraConfig.get().runtime.choices)
        return run(to_config(composed))
    except ConfigError as error:  # as SystemExit it passes through Hydra, which would print a report of its own
        refuse(str(error))


def refuse(problems: str) -> NoReturn:
    """End with exit code 2 and one message, a line for every problem."""
    print("error: " + problems.replace("\n", "\n       "), file=sys.stderr)
    sys.exit(2)


def run(config: Config) -> float | None:
    """Set the environment and run the task; in a sweep start the point as a child instead."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return run_point(config, HydraConfig.get().overrides.task)
    if config.task.name == "train" and config.hw.chip is not None:
        check_plan(config)
    prepare_environment(config.hw, is_planned=config.task.name == "plan")
    task = importlib.import_module(f"tpu_experiments.tasks.{config.task.name}")
    task.run(config)
    return None


def check_plan(config: Config) -> None:
    """Refuse a run that is known not to fit; a machine without a chip to plan for never loads this."""
    from tpu_experiments.logging.runlog import start_run_log
    from tpu_experiments.planning.check import check_memory

    start_run_log(None, rank=0)
    check_memory(config)


def remove_leftover(folder: Path) -> None:
    """Hydra's multirun.yaml, which no setting leaves out; every point's run folder has its own config."""
    (folder / "multirun.yaml").unlink(missing_ok=True)
    with suppress(OSError):  # it is not empty
        folder.rmdir()


def run_point(config: Config, overrides: list[str]) -> float:
    """Run one point of a sweep as a child; its held-out loss, NaN when it failed (the sweep goes on) or is no training.

    A process can initialise its devices once only, and the environment they read cannot change afterwards. A request to
    stop is passed on to the child, and ends the sweep.
    """
    changed = changed_by(overrides)
    point, output_dir = point_name(changed), paths.join(config.output_dir, "sweeps", str(config.name))
    command = [sys.executable, __file__, *changed, f"name='{point}'", f"output_dir='{output_dir}'"]
    if isinstance(config.task, PlanTaskConfig) and config.task.compiled_folder is None:
        command.append(f"task.compiled_folder='{paths.join(config.output_dir, 'plans', 'compiled')}'")
    print(f"sweep point {point} -> {output_dir}/{point}", flush=True)
    code = None if RELAY.asked else RELAY.run(command)
    if RELAY.asked or code == STOPPED_EXIT_CODE:
        leave_sweep(all_points()[HydraConfig.get().job.num + (code == 0) :])
    if code:
        print(f"sweep point {point} ended with exit code {code}; the sweep goes on", file=sys.stderr)
        return float("nan")
    if config.task.name != "train":
        return float("nan")
    return float(json.loads(paths.read_text(paths.join(output_dir, point, "result.json")))["eval_loss"])


def leave_sweep(left: list[str]) -> None:
    """Say which points are not done and end the process, where there are any."""
    if left:
        print(f"the sweep was stopped on request; the same command goes on with {'; '.join(left)}", file=sys.stderr)
        sys.exit(STOPPED_EXIT_CODE)


def all_points() -> list[str]:
    """Names of all points of this sweep, in their order, from the command line and `hydra.sweeper.params`."""
    given = [each for each in get_args_parser().parse_args().overrides if not each.startswith(("hydra.", "hydra/"))]
    params = [f"{key}={values}" for key, values in (HydraConfig.get().sweeper.get("params") or {}).items()]
    (points,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(params + given), None)
    return [point_name(changed_by(overrides)) for overrides in points]


def changed_by(overrides: list[str]) -> list[str]:
    """The overrides of a point without those that the sweep gives itself."""
    return [o for o in overrides if not o.startswith(("name=", "output_dir="))]


def laid_under(arguments: list[str]) -> list[str]:
    """The command line with the overrides of the overlay that `+plan=FILE` names.

    Raises:
        ConfigError: there is no such file, or it is no overlay.
    """
    file = overlay_file(arguments)
    if file is None:
        return arguments
    if not paths.exists(file):
        raise ConfigError(
            f"+plan={file}; there is no such file; task=plan task.explore=search writes one, best.yaml beside the plan."
        )
    return with_overlay(arguments, text=paths.read_text(file), file=file)


def point_name(overrides: list[str]) -> str:
    """The overrides as the name of a folder: `lora.r=8,lora.alpha=16`."""
    plain = re.sub(r"[\[\]{}'\" ]", "", ",".join(overrides))
    return re.sub(r"[^A-Za-z0-9._+=,-]+", "-", plain).strip("._+=,-") or "base"


if __name__ == "__main__":
    if {"-h", "--help"}.intersection(sys.argv[1:]):
        print(help_text())
        sys.exit(0)
    try:
        sys.argv[1:] = laid_under(sys.argv[1:])
        main()
    except ConfigError as error:
        refuse(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        refuse(sentence(error))
    except MarkedYAMLError as error:
        refuse(unreadable_yaml(error))
    except ValueError as error:
        if "Config group override must be" not in str(error):
            raise
        refuse(null_group(sys.argv[1:]))
