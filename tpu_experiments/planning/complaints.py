"""Errors of the compiler other than too little HBM, in one sentence each."""

import signal

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.planning.oom import OutOfMemory

NOISE = ("TPU worker", "accelerator type", "InitGoogle", "libtpu_init_utils", "Source Location Trace", "host bounds")
"""Parts of lines that libtpu writes because there is no TPU."""
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
KIB = 1024


def about_topology(hw: HwConfig, *, said: str) -> ConfigError:
    """Return the error for a topology that libtpu does not know, or not with this many chips."""
    return ConfigError(
        f"hw.topology={hw.topology}; the TPU compiler has no such slice of {hw.num_devices} chips: {words_of(said)}; "
        "write GENERATION:SIDExSIDE, for example v6e:1x1, v6e:2x2, v5e:2x4 or v5e:16x16, or take a hw of conf/hw."
    )


def about_chips(hw: HwConfig, *, num_there: int) -> ConfigError:
    """Return the error for more chips than the topology has."""
    return ConfigError(
        f"hw.num_devices={hw.num_devices}; hw.topology={hw.topology} has {num_there}; give the topology of as many "
        f"chips, or hw.num_devices={num_there}."
    )


def about_kernel_memory(shortage: OutOfMemory, *, what: str) -> ConfigError:
    """Return the error for a kernel whose blocks do not fit into the chip's vector memory."""
    used, limit = (round(gib * KIB * KIB) for gib in (shortage.used_gib, shortage.limit_gib))
    return ConfigError(
        f"task=plan; {what} takes {used:,} KiB of {shortage.memory_space} in one kernel and {limit:,} KiB are there; "
        "use smaller blocks of attention, or raise --xla_tpu_scoped_vmem_limit_kib in hw.libtpu_flags."
    )


def about_program(said: str, *, what: str) -> ConfigError:
    """Return the error for a program that the compiler refused for a reason of its own."""
    return ConfigError(
        f"task=plan; the compiler refused {what}: {words_of(said)}; nothing is remembered of it; try another "
        "trainer.micro_batch_rows, trainer.seq_len or sharding, or report it as a fault of libtpu."
    )


def about_process(code: int, *, stderr: str, what: str) -> ConfigError:
    """Return the error for a compiler process that ended without an answer."""
    said = [line for line in stderr.splitlines() if line.strip() and not any(part in line for part in NOISE)]
    if code in KILLED:
        return ConfigError(
            f"task=plan; the compilation of {what} was killed, as a machine does that is out of memory; close other "
            "programs, lower task.workers, or plan on a machine with more memory (24 GB suffice for 7B); what is "
            "compiled so far is kept."
        )
    flag = next((line for line in said if "Unknown command line flag" in line), None)
    if flag:
        return ConfigError(
            f"hw.libtpu_flags; libtpu knows no flag {flag.rpartition('flag')[2].strip()} and ends at once, as it "
            "would on the TPU; correct or remove it."
        )
    if code < 0:
        return ConfigError(
            f"task=plan; the compiler crashed ({signal.Signals(-code).name}) at {what}; that is a fault of "
            "libtpu, which another trainer.micro_batch_rows, trainer.seq_len or hw.libtpu_flags may avoid."
        )
    return ConfigError(
        f"task=plan; the compilation of {what} ended with exit code {code}: {said[-1] if said else 'silent'}; check "
        "hw.libtpu_flags and that libtpu is installed (the tpu extra), or use task.method=analytic."
    )


def words_of(said: str) -> str:
    """Return the compiler's first line without the exception's name, cut off after 240 characters."""
    first = next((line.strip() for line in said.splitlines() if line.strip()), "silent")
    return first.removeprefix("XlaRuntimeError: ")[:240].rstrip(".")
