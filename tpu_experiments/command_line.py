"""Run every command: compose and check the config, set the environment, then run the task.

`run.py` in a checkout, `tpu-experiments` of an installed package and `python -m tpu_experiments` call `main`. Neither
this file nor tpu_experiments/config imports torch, because torch_xla reads its flags once, when imported.
"""

from tpu_experiments.runtime.processes.interrupts import INTERRUPTED, INTERRUPTED_EXIT_CODE  # isort: split

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

# Hydra raises errors instead of exiting; errors_as_sentences reports them.
os.environ.setdefault("HYDRA_FULL_ERROR", "1")
# Hydra only finds launchers in the namespace package `hydra_plugins`; this folder holds this project's portion of it.
sys.path.append(str(Path(__file__).parent / "sweeping" / "plugin"))

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from tpu_experiments.config.compose import as_typed, earlier_name, require_single_choices, to_config
from tpu_experiments.config.defaults import is_open
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.escaping import for_terminal
from tpu_experiments.config.folders import CONF
from tpu_experiments.config.messages import (
    argument_problem,
    choices,
    help_text,
    is_of_composition,
    sentence,
    uncomposable,
    unreadable_yaml,
)
from tpu_experiments.config.overlay import overlay_file, with_overlay, with_own_entries
from tpu_experiments.config.places import place_problem
from tpu_experiments.config.redaction import redacted_text
from tpu_experiments.config.regular_files import MOST_BYTES, NotRegular
from tpu_experiments.config.schema import Config, register
from tpu_experiments.config.words import with_machines
from tpu_experiments.config.yaml_bounds import require_bounded_folder
from tpu_experiments.loggers.closing_lines import print_if_finished
from tpu_experiments.loggers.runlog import start_run_log
from tpu_experiments.runtime.processes.env import prepare_environment, require_device_files
from tpu_experiments.runtime.processes.faults import ending_of
from tpu_experiments.storage import paths
from tpu_experiments.storage.gguf.files import pinned
from tpu_experiments.storage.offline import go_offline_if_unreachable
from tpu_experiments.storage.retry import StorageFailed, explain_storage_errors
from tpu_experiments.storage.run_folder import with_earlier_name
from tpu_experiments.sweeping.launcher import PointLauncher
from tpu_experiments.training.given import foreign_data, require_given

log = logging.getLogger(__name__)
LOADING = ("train", "pack", "evaluate", "generate", "serve", "export", "resume_check", "certify")
"""Tasks that import torch, torch_xla and transformers, which takes 8 s on one core, before their first log line."""
PLANNED = ("plan", "certify")
"""Tasks that compile for a machine that need not be here."""
ON_THE_HOST = ("prepare", "tokenizer", "export")
"""Tasks that use no chips, so that a machine without them can do them for one that has them."""

register()


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def composed_run(composed: DictConfig) -> None:
    """Check the composed config and run it; each point of a sweep calls this in a process of its own."""
    with errors_as_sentences():  # Hydra passes SystemExit through, but prints its own report of other exceptions
        require_single_choices(HydraConfig.get().runtime.choices)
        config = to_config(as_typed(composed, HydraConfig.get().overrides.task))
        with errors_as_sentences(config):
            run(config)


@contextmanager
def errors_as_sentences(config: Config | None = None) -> Iterator[None]:
    """Report an error of the block in one sentence, and exit.

    Exit codes: 2 for errors that the user can fix, 1 for storage failures and bugs, 75 for a TPU that stopped working,
    and that of Ctrl-C.

    Args:
        config: names the run folder whose run.log takes the traceback of a bug; None before the config is composed.
    """
    try:
        yield
    except ConfigError as error:
        refuse(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        refuse(sentence(error))
    except MarkedYAMLError as error:
        refuse(unreadable_yaml(error))
    except StorageFailed as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        sys.exit(INTERRUPTED_EXIT_CODE)
    except Exception as error:
        if is_of_composition(error):
            refuse(uncomposable(error, sys.argv[1:]))
        said, code = ending_of(error, config=config)
        print(for_terminal(redacted_text(f"error: {said}")), file=sys.stderr)
        sys.exit(code)


def refuse(problems: str) -> NoReturn:
    """Exit with code 2 after printing one message with a line for each problem."""
    print("error: " + for_terminal(redacted_text(problems)).replace("\n", "\n       "), file=sys.stderr)
    sys.exit(2)


def run(config: Config) -> None:
    """Set the environment and run the task.

    Raises:
        ConfigError: a sweep uses a launcher that would run its points in this process.
    """
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ConfigError("hydra/launcher; a sweep needs a process per point, which hydra/launcher=points gives it.")
    config = pinned(config)
    with explain_storage_errors(config.output_dir):
        config = with_earlier_name(config, earlier=earlier_name(config))
    if config.task.name == "train" and config.hw.num_hosts == 1 and print_if_finished(config):
        return
    is_planned = config.task.name in PLANNED
    is_on_host = config.task.name in ON_THE_HOST and not getattr(config.task, "predicts", False)
    hw = replace(config.hw, device="cpu") if is_on_host else config.hw
    # task=doctor reports on the unchanged environment
    needs_device = config.task.name not in ("report", "doctor", "convert")
    if config.task.name == "train" and config.hw.chip is not None:
        check_plan(config)
    if needs_device and not is_planned:
        require_device_files(hw)
    require_given(config)
    if needs_device and hw.device == "cuda":  # before the first request to the Hub
        prepare_environment(hw, is_planned=is_planned)
    if needs_device:
        go_offline_if_unreachable(config)
    if needs_device and hw.device != "cuda":
        prepare_environment(hw, is_planned=is_planned)
    if config.task.name in LOADING:
        start_run_log(None, rank=0)
        log.info("%s: loading torch and its dependencies", worked_on(config))
    hint = foreign_data(config) if config.task.name in ("train", "prepare") else None
    if hint is not None:
        start_run_log(None, rank=0)
        log.warning("%s", hint)
    task = importlib.import_module(f"tpu_experiments.tasks.{config.task.name}")
    task.run(config)


def worked_on(config: Config) -> str:
    """Return what a task works on, for its first line: the run, adapter or file that it names, else its own run."""
    named = (getattr(config.task, key, None) for key in ("adapter", "gguf", "run"))
    return next((place for place in named if place not in (None, "none")), str(config.name))


def check_plan(config: Config) -> None:
    """Refuse a run that is known not to fit the chips' memory; call it only with `hw.chip` set.

    The planner is imported here, so that machines without such a chip never load it.
    """
    from tpu_experiments.planning.check import check_memory
    from tpu_experiments.planning.tuned import tuned

    start_run_log(None, rank=0)
    check_memory(config if is_open(config) else tuned(config, is_logged=False))


def with_plan_overlay(arguments: list[str]) -> list[str]:
    """Return the command line with `+plan=FILE` replaced by that file's overrides.

    Keys that are also on the command line keep its values.

    Raises:
        ConfigError: the file does not exist, cannot be read, or is not an overlay.
    """
    file = overlay_file(arguments)
    if file is None:
        return arguments
    wrong = place_problem("+plan", file, kind="file")
    if wrong is not None:
        raise ConfigError(wrong)
    if not paths.exists(file):
        raise ConfigError(
            f"+plan={file}; there is no such file; task=plan task.explore=search writes one, best.yaml beside the plan."
        )
    try:
        text = paths.read_text(file, most=MOST_BYTES[".yaml"])
    except NotRegular as error:
        raise ConfigError(f"+plan={error}") from error
    except (OSError, UnicodeDecodeError) as error:  # a folder, or not UTF-8
        raise ConfigError(f"+plan={file}; it cannot be read ({error}); give a plan's best.yaml.") from error
    return with_overlay(arguments, text=text, file=file)


def check_yaml(arguments: list[str]) -> None:
    """Refuse YAML whose aliases expand beyond memory, before Hydra reads it.

    Checked are conf/ and the config folders named in `arguments`, those of hydra.searchpath too.

    Raises:
        ConfigError: a file is too large once its aliases are expanded.
    """
    options = {"--config-dir", "-cd", "--config-path", "-cp"}
    folders = [CONF]
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        option, _, value = argument.partition("=")
        if option in options:
            folders.append(Path(value or following))
        elif option.lstrip("+") == "hydra.searchpath":
            places = (place.strip(" '\"").removeprefix("file://") for place in value.strip("'\"[]").split(","))
            folders += [Path(place) for place in places if place and "://" not in place]
    for folder in folders:
        require_bounded_folder(folder)


def with_whole_paths(arguments: list[str]) -> list[str]:
    """Return the arguments with `--config-path` from the working folder: Hydra looks for it in this file's package.

    >>> with_whole_paths(["--config-path=/mine", "-cp", "/mine", "seed=1"])
    ['--config-path=/mine', '-cp', '/mine', 'seed=1']
    """
    whole, before = [], ""
    for argument in arguments:
        option, has_value, value = argument.partition("=")
        if option == "--config-path" and has_value:
            argument = f"{option}={Path(value).absolute()}"
        elif before in ("--config-path", "-cp"):
            argument = str(Path(argument).absolute())
        whole.append(argument)
        before = argument
    return whole


def main() -> None:
    """Run the command of `sys.argv`."""
    if {"-h", "--help"}.intersection(sys.argv[1:]):
        print(help_text())
        sys.exit(0)
    with errors_as_sentences():
        check_yaml(sys.argv[1:])
        wrong = argument_problem(sys.argv[1:])
        if wrong is not None:
            raise ConfigError(wrong)
        sys.argv[1:] = with_whole_paths(sys.argv[1:])
        sys.argv[1:] = with_machines(with_own_entries(with_plan_overlay(sys.argv[1:])), choices("hw"))
        composed_run()
        if PointLauncher.latest is not None:
            sys.exit(PointLauncher.latest.finish())
