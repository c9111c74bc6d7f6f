"""Exported variables that torch_xla 2.9 and libtpu read and the config does not control.

What would end a run, leave it waiting or change its numbers is refused; what is only odd is a warning. Colab, Kaggle
and GKE export TPU_SKIP_MDS_QUERY, TPU_ACCELERATOR_TYPE, TPU_WORKER_ID, TPU_WORKER_HOSTNAMES and the bounds of hosts,
which are right; a sweep gives its points TPU_VISIBLE_CHIPS and bounds of one chip (chips.py).
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.runtime.processes.chips import VISIBLE
from tpu_experiments.runtime.processes.metadata import CHIP_BOUNDS

COUNTS = ("PJRT_LOCAL_PROCESS_COUNT", "PJRT_LOCAL_PROCESS_RANK", "TPU_NUM_DEVICES")
BOUNDS = ("TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS")
NUMBERS = {
    "XLA_USE_BF16": "float32 is computed in bfloat16; use model.dtype=",
    "XLA_DOWNCAST_BF16": "float32 is computed in bfloat16; use model.dtype=",
    "XLA_USE_32BIT_LONG": "int64 is computed in 32 bits",
    "XLA_DISABLE_FUNCTIONALIZATION": "gradients are others: updates in place of views are lost",
    "XLA_USE_EAGER_DEBUG_MODE": "each operation is compiled and run by itself",
}
"""What changes a program behind its code, each tried with torch_xla 2.9.0 on a CPU (2026-11-28): 1.0011 reads as 1.0,
2^40 + 2 as 2; without functionalization three steps of model=tiny end at a held-out loss of 5.396 instead of 5.412."""
WITHOUT_EFFECT = ("XLA_USE_FP16", "XLA_DOWNCAST_FP16")
DEBUG = ("XLA_IR_DEBUG", "XLA_HLO_DEBUG")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
OVERWRITTEN = ("PJRT_DEVICE", "CPU_NUM_DEVICES")
PROCESSES = ("TPU_PROCESS_ADDRESSES", "TPU_PROCESS_PORT", "CLOUD_TPU_TASK_ID")
"""What torch_xla sets for each process of one chip, unless it is exported: Kaggle exports the first as `local`."""
HOST = ("TPU_HOST_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS")
SPMD = ("XLA_USE_SPMD", "XLA_AUTO_SPMD")
SWITCHES = (*NUMBERS, *WITHOUT_EFFECT, *DEBUG, *SPMD)
KNOWN = (
    *(*COUNTS, *VISIBLE, *BOUNDS, *SWITCHES, *FLAGS, *OVERWRITTEN, *PROCESSES, *HOST),
    "XLA_ENABLE_PARAM_ALIASING",
)


@dataclass(frozen=True)
class Stray:
    """An exported variable that misleads a run, and what to do about it."""

    seen: str
    remedy: str
    is_fatal: bool


def exported_variables() -> dict[str, str]:
    """Return the exported variables among `KNOWN`; no other is read, so no secret is."""
    return {name: os.environ[name] for name in KNOWN if os.environ.get(name)}


def stray_variables(exported: Mapping[str, str], hw: HwConfig) -> list[Stray]:
    """Return the variables that mislead a run on this hardware."""
    if hw.runtime != "xla":
        return []
    on = {name: value for name, value in exported.items() if not (name in SWITCHES and value.lower() in ("0", "false"))}
    found = [_stray(name, value, hw=hw) for name, value in on.items()]
    if hw.device == "tpu":
        found.append(_too_few_chips(exported, hw=hw))
    return [each for each in found if each is not None]


def refusal_of(strays: Sequence[Stray]) -> str | None:
    """Return the sentence that refuses a run for its fatal variables; None without one."""
    fatal = [each for each in strays if each.is_fatal]
    return " ".join(f"{each.seen} is exported; {each.remedy}." for each in fatal) or None


def _stray(name: str, value: str, *, hw: HwConfig) -> Stray | None:
    seen = f"{name}={value[:60]}"
    reason = _fatal_reason(name, value, hw=hw)
    if reason is not None:
        return Stray(seen, f"`unset {name}`: {reason}", is_fatal=True)
    odd = _odd_reason(name, value, hw=hw)
    return Stray(seen, f"`unset {name}`{odd}", is_fatal=False) if odd is not None else None


def _fatal_reason(name: str, value: str, *, hw: HwConfig) -> str | None:
    """Return why a run must not start with a variable; None where it may."""
    if name in COUNTS or (name == "XLA_USE_SPMD" and hw.parallel != "spmd"):
        return "it falsifies the number of devices"
    if name == "XLA_AUTO_SPMD" and hw.parallel == "spmd":
        return "the compiler shards by itself, and not as sharding= says"
    if name in NUMBERS:
        return NUMBERS[name]
    if hw.device != "tpu":
        return None
    is_spawn, chips = hw.parallel == "spawn", hw.num_devices // hw.num_hosts
    if name in PROCESSES and is_spawn:
        return (
            "each process of one chip inherits it and dies (`Expected 8 worker addresses, got 1`); or use "
            "hw.parallel=spmd"
        )
    if name in VISIBLE and (is_spawn or (count := len(value.split(","))) < chips):
        given = "each process of one chip gets the same" if is_spawn else f"it gives this run {count}"
        return f"{given} of its host's {chips} chips"
    wanted = {"TPU_PROCESS_BOUNDS": hw.num_hosts, "TPU_CHIPS_PER_PROCESS_BOUNDS": chips}
    if is_spawn:
        wanted = {"TPU_PROCESS_BOUNDS": hw.num_devices, "TPU_CHIPS_PER_PROCESS_BOUNDS": 1}
    if name in wanted and _product(value) not in (None, wanted[name]):
        what = "processes" if name == "TPU_PROCESS_BOUNDS" else "chips a process"
        return f"it is {_product(value)} {what}, and hw={hw.name} has {wanted[name]}"
    return None


def _odd_reason(name: str, value: str, *, hw: HwConfig) -> str | None:
    """Return what is odd about a variable, as it follows `unset NAME`; None if nothing."""
    if name in WITHOUT_EFFECT:
        return ": torch_xla 2.9 no longer reads it; use model.dtype="
    if name in DEBUG and hw.device == "tpu":
        return ": it changes the keys of the compile cache, so nothing in it is found"
    if name in FLAGS:
        unknown = "a flag that XLA does not know ends the process" if name == "XLA_FLAGS" else "libtpu aborts on others"
        return f" unless you mean it, or use hw.libtpu_flags=: {unknown}"
    if name == "XLA_ENABLE_PARAM_ALIASING" and value.lower() in ("0", "false"):
        return ": a step then holds weights and optimizer twice"
    mine = {"PJRT_DEVICE": hw.device.upper(), "CPU_NUM_DEVICES": str(hw.num_devices)}
    if name in OVERWRITTEN and value != mine[name] and not (name == "CPU_NUM_DEVICES" and hw.device != "cpu"):
        return f": the run sets it to {mine[name]} itself, your other programs see yours"
    return None


def _product(bounds: str) -> int | None:
    """Return the product of bounds such as `2,2,1`; None where they are no numbers."""
    try:
        return math.prod(int(part) for part in bounds.split(","))
    except ValueError:
        return None


def _too_few_chips(exported: Mapping[str, str], *, hw: HwConfig) -> Stray | None:
    """Judge the bounds of hosts and of chips on a host, which a notebook service exports in place of metadata."""
    hosts, chips = exported.get("TPU_HOST_BOUNDS", ""), exported.get("TPU_CHIPS_PER_HOST_BOUNDS", "")
    if not chips or (not hosts and hw.num_hosts > 1):
        return None
    count = _product(f"{hosts or '1,1,1'},{chips}")
    if count is None or count >= hw.num_devices:
        return None
    seen = f"TPU_CHIPS_PER_HOST_BOUNDS={chips} TPU_HOST_BOUNDS={hosts} (chips: {count}, hw={hw.name}: {hw.num_devices})"
    known = CHIP_BOUNDS.get(hw.num_devices // hw.num_hosts)
    remedy = f"`export TPU_CHIPS_PER_HOST_BOUNDS={known}`" if known else "unset them"
    return Stray(seen, f"{remedy}, or choose the hw= of {count}", is_fatal=True)
