"""The one entry point: compose and check the config, set the environment, then run the task.

Nothing here or in tpu_experiments/config imports torch: torch_xla fixes its flags when it is imported.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import NoReturn

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors arrive here as exceptions, to become one sentence
# Hydra takes launchers from a namespace of its own alone; ours is the portion that lies there.
sys.path.append(str(Path(__file__).parent / "tpu_experiments" / "sweeping" / "plugin"))

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.help import help_text
from tpu_experiments.config.load import require_single_choices, to_config
from tpu_experiments.config.overlay import overlay_file, with_overlay
from tpu_experiments.config.refusals import null_group, sentence, unreadable_yaml
from tpu_experiments.config.schema import Config, register
from tpu_experiments.io import paths
from tpu_experiments.runtime.env import prepare_environment
from tpu_experiments.sweeping.launcher import PointLauncher

register()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(composed: DictConfig) -> None:
    """Check the composed config and run it; a sweep's points come here in processes of their own."""
    try:
        require_single_choices(HydraConfig.get().runtime.choices)
        run(to_config(composed))
    except ConfigError as error:  # as SystemExit it passes through Hydra, which would print a report of its own
        refuse(str(error))


def refuse(problems: str) -> NoReturn:
    """End with exit code 2 and one message, a line for every problem."""
    print("error: " + problems.replace("\n", "\n       "), file=sys.stderr)
    sys.exit(2)


def run(config: Config) -> None:
    """Set the environment and run the task."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ConfigError("hydra/launcher; a sweep needs a process per point, which hydra/launcher=points gives it.")
    if config.task.name == "train" and config.hw.chip is not None:
        check_plan(config)
    if config.task.name not in ("report", "doctor"):  # a doctor looks at the environment as it is, and starts no device
        prepare_environment(config.hw, is_planned=config.task.name == "plan")
    task = importlib.import_module(f"tpu_experiments.tasks.{config.task.name}")
    task.run(config)


def check_plan(config: Config) -> None:
    """Refuse a run that is known not to fit; a machine without a chip to plan for never loads this."""
    from tpu_experiments.logging.runlog import start_run_log
    from tpu_experiments.planning.check import check_memory

    start_run_log(None, rank=0)
    check_memory(config)


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


if __name__ == "__main__":
    if {"-h", "--help"}.intersection(sys.argv[1:]):
        print(help_text())
        sys.exit(0)
    try:
        sys.argv[1:] = laid_under(sys.argv[1:])
        main()
        if PointLauncher.latest is not None:
            sys.exit(PointLauncher.latest.finish())
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
