"""task=plan: estimate a run's memory, time and cost on its TPU or GPU, on a machine without one.

`run` chooses the method and the configs; compiled.py and formulas.py each plan a config, search.py searches
settings, and output.py writes and prints. Slow imports are deferred until the checks are done.
"""

import importlib.util
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tpu_experiments.config.compose import variant
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import PlanTaskConfig
from tpu_experiments.planning import oom
from tpu_experiments.planning.compiler import python_of, versions_in
from tpu_experiments.runtime.patches import TORCHTPU, require_versions

STOPPED_EXIT_CODE = 75
"""Exit code of a stopped run: the same command continues it."""


def run(config: Config) -> None:
    """Print the plan and write plan.json, plan.md and plan.svg to `<output_dir>/plans/<name>`.

    Raises:
        ConfigError: the hardware has no TPU topology, the compiler could not be run, or a pack is to be planned by
            formulas.
    """
    settings = config.task
    assert isinstance(settings, PlanTaskConfig)
    check_hw(config)
    machines = {name: for_machine(name, config) for name in settings.compare if name != config.hw.name}
    for each in machines.values():
        check_hw(each)
    method = chosen_method(settings, runtime=config.hw.runtime)
    if settings.libtpu is not None:
        settings = replace(settings, libtpu=environment_with_libtpu(settings.libtpu, method=method))
    if method == "analytic" and settings.pack > 1:
        raise ConfigError(
            f"task.pack={settings.pack}; formulas know one adapter, and nothing is compiled here; install libtpu (the "
            "tpu extra) and leave task.method out, or use task.pack=1."
        )
    if settings.decode.rows is not None and (method == "analytic" or config.hw.device == "cuda"):
        raise ConfigError(
            f"task.decode.rows={settings.decode.rows}; formulas know no decoder, and nothing is compiled here; plan a "
            "TPU with libtpu installed (the tpu extra), or leave task.decode.rows out."
        )
    if settings.decode.rows is not None and config.objective.samples_rollouts:
        raise ConfigError(
            f"task.decode.rows={settings.decode.rows} with objective={config.objective.name}; the answers of its "
            "rollouts are planned (rollout.prompts, rollout.samples, rollout.max_new_tokens); leave task.decode out."
        )
    if settings.orders > 1 and (method == "analytic" or config.hw.num_devices == 1):
        what = f"hw={config.hw.name} has one chip" if config.hw.num_devices == 1 else "nothing is compiled here"
        raise ConfigError(f"task.orders={settings.orders}; {what}; leave task.orders out.")
    try:
        plan_all(config, machines, settings, method=method)
    except KeyboardInterrupt:
        print("stopped; finished compilations are cached, and the same command continues", file=sys.stderr)
        sys.exit(STOPPED_EXIT_CODE)


def plan_all(config: Config, machines: dict[str, Config], settings: PlanTaskConfig, *, method: str) -> None:
    """Make, write and print the plans of all machines.

    The config's own comes last, since its table shows the others.

    Raises:
        ConfigError: one of them has no plan; the others are written.
    """
    from tpu_experiments.loggers.runlog import terminal_log
    from tpu_experiments.tasks.plan.output import publish
    from tpu_experiments.tasks.plan.search import case_of, plans_of

    with terminal_log():
        cases = [case_of(each, f"hw={name}") for name, each in machines.items()] + [case_of(config)]
        answers = plans_of(cases, settings, method=method)
        for case, answer in zip(cases, answers, strict=True):
            if not isinstance(answer, ConfigError):
                publish(answer, config=case.config)
    problems = [str(answer) for answer in answers if isinstance(answer, ConfigError)]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def for_machine(name: str, config: Config) -> Config:
    """Return the same command for another machine, with a folder of its own.

    Raises:
        ConfigError: there is no such machine, or the batch cannot be divided for it.
    """
    found = variant(f"hw={name}")
    return replace(found, name=f"{found.name}_{name}") if found.name == config.name else found


def check_hw(config: Config) -> None:
    """Refuse hardware that neither the TPU compiler supports nor a datasheet describes.

    Raises:
        ConfigError: a TPU without a topology, or with too small a one; no datasheet; a GPU with task.method=compiled.
    """
    hw = config.hw
    is_gpu = hw.device == "cuda" and hw.chip is not None
    if is_gpu and isinstance(config.task, PlanTaskConfig) and config.task.method == "compiled":
        raise ConfigError(
            f"hw={hw.name} with task.method=compiled; the compiler is that of TPUs, and a GPU is planned from its "
            "datasheet; use task.method=analytic."
        )
    if is_gpu:
        return
    if hw.topology is None or hw.runtime == "eager":
        raise ConfigError(
            f"hw={hw.name}; task=plan compiles for a TPU, or reads a GPU's datasheet, and this hardware names neither "
            "topology nor chip; choose one that does, for example hw=v5e8, hw=v6e8, hw=colab or hw=l4."
        )
    if hw.chip is None:
        raise ConfigError(f"hw={hw.name}; hw.chip is null; a plan needs the chip's datasheet; fill it in.")
    # Before the compiler is started. A chip of a topology of another name may be several devices: there it tells.
    sides = re.fullmatch(r"v\w+:(\d+(?:x\d+)*)", hw.topology)
    num_there = math.prod(int(side) for side in sides[1].split("x")) if sides else hw.num_devices
    if num_there < hw.num_devices:
        raise oom.too_many_chips(hw, num_there=num_there)


def chosen_method(settings: PlanTaskConfig, *, runtime: str) -> str:
    """Return `compiled` or `analytic`.

    Args:
        runtime: `hw.runtime`, whose packages lower the programs.

    Raises:
        ConfigError: `compiled` is requested without a compiler, or hw.runtime=torchtpu without its environment.
    """
    if runtime == "torchtpu":
        require_versions(*TORCHTPU, of=TORCHTPU, lock="requirements-torchtpu.lock")
        return "analytic" if settings.method == "analytic" else "compiled"
    is_there = all(importlib.util.find_spec(name) for name in ("libtpu", "jax", "torch_xla"))
    if settings.method == "compiled" and not is_there:
        raise ConfigError(
            "task.method=compiled; libtpu, which holds the TPU's compiler, is not installed (it has wheels for Linux "
            "on x86-64 and Python 3.11 to 3.13); install the tpu extra, or use task.method=analytic."
        )
    if is_there and settings.method != "analytic":
        require_versions("torch", "torch_xla", "jax", "libtpu")
    return "compiled" if is_there and settings.method != "analytic" else "analytic"


def environment_with_libtpu(folder: str, *, method: str) -> str:
    """Return the absolute path of the environment whose libtpu is to compile (task.libtpu).

    Raises:
        ConfigError: nothing is compiled, or the folder is no environment with libtpu and jax.
    """
    if method == "analytic":
        raise ConfigError(
            f"task.libtpu={folder} with task.method=analytic; formulas compile nothing; use task.method=compiled."
        )
    path = Path(folder).absolute()
    make = (
        "launch/local.sh makes one (TPU_EXPERIMENTS_VENV=.venv-torchtpu "
        "TPU_EXPERIMENTS_LOCK=launch/requirements-torchtpu.lock bash launch/local.sh ...)"
    )
    if not Path(python_of(str(path))).exists():
        raise ConfigError(f"task.libtpu={folder}; it is no virtual environment, as it has no bin/python; {make}.")
    try:
        found = versions_in(str(path))
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or ["silent"])[-1]
        raise ConfigError(f"task.libtpu={folder}; this program does not run in it ({why}); {make}.") from error
    except OSError as error:
        raise ConfigError(f"task.libtpu={folder}; its Python does not start ({error.strerror}); {make}.") from error
    missing = [name for name in ("libtpu", "jax") if name not in found]
    if missing:
        raise ConfigError(f"task.libtpu={folder}; {' and '.join(missing)} is not installed there; {make}.")
    return str(path)
