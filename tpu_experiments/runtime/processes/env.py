"""Environment variables of a run, set before torch_xla reads its flags, at import, and libtpu its, with a device."""

import functools
import logging
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tpu_experiments.config.commands import command, typed
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.folders import cache_folder
from tpu_experiments.config.hardware import LIBTPU_INIT_ARGS, HwConfig, flags_of
from tpu_experiments.config.schema import Config
from tpu_experiments.runtime.processes.chips import (
    device_nodes,
    held_text,
    holders_of,
    kill_text,
    one_of_several,
    tpu_present,
)
from tpu_experiments.runtime.processes.libtpu import libtpu_problem
from tpu_experiments.runtime.processes.metadata import metadata_problem
from tpu_experiments.runtime.processes.variables import exported_variables, refusal_of, stray_variables

log = logging.getLogger(__name__)
GPU_NODES = ("nvidia*", "dxg", "nvhost*", "kfd")
"""Device nodes of a GPU that torch may use as cuda: NVIDIA's driver, that of WSL, of Jetson, and AMD's."""
HELD_SECONDS = 5.0
"""Time that a process which has just ended, or is ending, is given to let go of its chips."""


def prepare_environment(hw: HwConfig, *, is_planned: bool = False) -> None:
    """Check that the device exists and nothing here keeps it from starting, and set the variables of `hw`.

    A plan traces on the CPU and needs no device.

    Raises:
        ConfigError: as of `require_device` and `require_start`.
        RuntimeError: torch_xla is already imported, so the variables would have no effect.
    """
    exported_flags()
    if hw.device == "tpu" and not is_planned:
        require_device(hw)
    require_start(hw, is_planned=is_planned)
    if is_planned:
        os.environ.update({"PJRT_DEVICE": "CPU", "TF_CPP_MIN_LOG_LEVEL": "1"})
        os.environ.update(of_torchtpu() if hw.runtime == "torchtpu" else {})
        return
    if hw.device == "tpu":
        raise_memlock()
    if "torch_xla" in sys.modules:
        raise RuntimeError("torch_xla was imported before the environment of hw was set; import nothing of it earlier")
    os.environ.update(variables(hw))
    if hw.device == "cuda":
        require_device(hw)


def change_flags(before: HwConfig, after: HwConfig) -> None:
    """Give libtpu the flags of another hardware config than the environment was prepared with.

    torch_xla may be imported; libtpu reads its flags when the first device is used.

    Raises:
        RuntimeError: one has been used, so the flags would have no effect.
    """
    wanted = " ".join(flags_of(after, exported=exported_flags()))
    if flags_of(before) == flags_of(after) or wanted == os.environ.get(LIBTPU_INIT_ARGS):
        return
    xla = sys.modules.get("torch_xla")
    if xla is not None and xla._XLAC._xla_runtime_is_initialized():
        raise RuntimeError("a device was used before the flags of libtpu were known; use none earlier")
    os.environ[LIBTPU_INIT_ARGS] = wanted


@functools.cache
def exported_flags() -> str:
    """Return LIBTPU_INIT_ARGS as the user exported it.

    A command asks first in `prepare_environment`: a run sets the variable then, and in a plan on a machine with a TPU
    torch_xla adds that machine's flags to it, which need not be those of the machine that is planned.
    """
    return os.environ.get(LIBTPU_INIT_ARGS, "")


def require_device(hw: HwConfig) -> None:
    """Look for the devices that `hw` asks for; nothing is initialised.

    Raises:
        ConfigError: `hw.device=tpu` on a machine without a TPU, or `cuda` on one with fewer GPUs.
    """
    require_device_files(hw)
    if hw.device != "cuda":
        return
    import torch  # its count respects CUDA_VISIBLE_DEVICES and leaves out GPUs that its CUDA version cannot use

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < hw.num_devices:
        raise ConfigError(
            f"hw.device=cuda asks for {hw.num_devices} NVIDIA GPU(s) and torch can use {found} here (nvidia-smi lists "
            "what the driver sees); run it on a machine that has them, or use hw=cpu here."
        )


def require_device_files(hw: HwConfig) -> None:
    """Look for what the driver of a TPU or GPU leaves on the disk, without loading torch.

    Raises:
        ConfigError: there is nothing, so that `hw.device` cannot be here.
    """
    if hw.device == "tpu" and not tpu_present():
        raise ConfigError(
            f"hw={hw.name} asks for a TPU and this machine has none (no Google PCI device, no /dev/accel*, "
            f"no /dev/vfio/*); {elsewhere(hw, sys.argv[1:])}."
        )
    if hw.device == "cuda" and not any(any(Path("/dev").glob(node)) for node in GPU_NODES):
        raise ConfigError(
            f"hw.device=cuda asks for {hw.num_devices} NVIDIA GPU(s) and this machine has no driver of one (no "
            "/dev/nvidia*); run it on a machine that has them, or use hw=cpu here."
        )


def elsewhere(hw: HwConfig, arguments: Sequence[str]) -> str:
    """Return how to plan, rent for or try the command of these arguments on a machine without a TPU."""
    words = [word for word in arguments if not word.startswith(("hw=", "task="))]
    tasks = [word for word in arguments if word.startswith("task=")]
    if tasks not in ([], ["task=train"]) or hw.rent is None:
        return "run it on the TPU VM, or use hw=cpu here"
    machine = f"hw={hw.name}"
    return (
        f"run it on the TPU VM, or plan it here: `{command(*words, machine, 'task=plan')}`, rent one: `python "
        f"launch/tpu.py train {typed(machine, '--', *words)}`, or use hw=cpu here, where "
        f"`{command(*words, 'debug=smoke')}` tries it on a tiny model"
    )


def require_start(hw: HwConfig, *, is_planned: bool = False) -> None:
    """Refuse what would end a run on this machine with a traceback, leave it waiting, or change its numbers.

    task=doctor reports the same. What is only odd is logged.

    Raises:
        ConfigError: a variable misleads the run, the metadata server does not answer, libtpu is of another version, or
            other processes hold the chips.
    """
    strays = [] if is_planned else stray_variables(exported_variables(), hw)
    if (refusal := refusal_of(strays)) is not None:
        raise ConfigError(f"hw={hw.name}; {refusal}")
    if hw.device == "tpu":
        for each in strays:
            _warn(f"{each.seen} is exported; {each.remedy}")
    if (problem := metadata_problem(hw, is_planned=is_planned)) is not None:
        raise ConfigError(f"hw={hw.name}; {problem[0]}; {problem[1]}.")
    if hw.device != "tpu" or is_planned:
        return
    if (problem := libtpu_problem(hw)) is not None:
        raise ConfigError(f"hw={hw.name}; {problem[0]}; {problem[1]}.")
    require_free_chips(hw)


@functools.cache
def _warn(text: str) -> None:
    """Log a warning once: a sweep checks each of its points."""
    log.warning("%s", text)


def require_free_chips(hw: HwConfig, *, seconds: float = HELD_SECONDS) -> None:
    """Refuse to start where other processes leave too few chips of this host free.

    Raises:
        ConfigError: after `seconds` they still hold them.
    """
    nodes, wanted = device_nodes(), hw.num_devices // hw.num_hosts
    until = time.monotonic() + seconds
    while True:
        holders, _ = holders_of(nodes) if nodes else ((), 0)
        num_free = len(nodes) - len({holder.node for holder in holders})
        if not holders or num_free >= wanted:
            return
        if time.monotonic() > until:
            break
        time.sleep(0.5)
    raise ConfigError(
        f"hw={hw.name}; it takes {wanted} of this host's {len(nodes)} chips, and {num_free} are free: "
        f"{held_text(holders)}; {kill_text(holders)}."
    )


def raise_memlock() -> None:
    """Raise this process's limit of locked memory as far as it may be, for itself and its children.

    libtpu locks the memory that chips read and write by themselves
    (cloud.google.com/kubernetes-engine/docs/how-to/tpus#privileged-mode). A process with CAP_SYS_RESOURCE may pass the
    hard limit, any other may reach it.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))


def variables(hw: HwConfig) -> dict[str, str]:
    """Return the environment variables for this hardware; `hw.env` overrides derived values."""
    values = {"TOKENIZERS_PARALLELISM": "true", "TF_CPP_MIN_LOG_LEVEL": "1"}
    if hw.runtime == "xla":
        values["PJRT_DEVICE"] = hw.device.upper()
    if hw.runtime == "xla" and hw.device == "cpu":
        values["CPU_NUM_DEVICES"] = str(hw.num_devices)
    if hw.runtime == "eager":
        values["USE_TORCH_XLA"] = "0"  # else transformers imports it, which takes seconds, and uses nothing of it
    if hw.runtime == "torchtpu":
        values |= {**of_torchtpu(), "JAX_PLATFORMS": "tpu,cpu" if hw.device == "tpu" else "cpu"}
        if hw.device == "cpu" and hw.parallel == "spmd":
            values["JAX_NUM_CPU_DEVICES"] = str(hw.num_devices // hw.num_hosts)
    if hw.device == "tpu" and hw.num_devices == 1:
        values |= one_of_several()
    flags = flags_of(hw, exported=exported_flags())
    return values | hw.env | ({LIBTPU_INIT_ARGS: " ".join(flags)} if flags else {})


def of_torchtpu() -> dict[str, str]:
    """Return the variables with which TorchTPU lowers programs without looking for a TPU."""
    return {
        "USE_TORCH_XLA": "0",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # else importing torch asks a metadata server for minutes
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # else a line for every operator that a program makes without a chip
    }


def compile_cache_folder(config: Config, *, process: int) -> str | None:
    """Return the persistent compile cache's folder of this process, or None; every process has its own."""
    chosen = compile_cache_root(config)
    return os.path.join(chosen, str(process)) if chosen is not None and config.hw.parallel == "spawn" else chosen


def compile_cache_root(config: Config) -> str | None:
    """Return the persistent compile cache's folder of all processes; None where the cache is off.

    `auto` is off for torch_xla: 2.9.0 calls a function of its client, DeserializeExecutable, that neither the CPU's nor
    the TPU's has (github.com/pytorch/xla/issues/9094, open), so what it writes is never read. jax's client, which runs
    TorchTPU's programs, has it: on a TPU `auto` keeps them.
    """
    hw, chosen = config.hw, config.hw.compile_cache
    if chosen == "auto" and hw.runtime == "torchtpu" and hw.device == "tpu":
        return cache_folder("compile_cache")
    return None if chosen in ("auto", "none") or hw.runtime == "eager" else chosen
