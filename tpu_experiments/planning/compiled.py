"""Compiles in processes of their own, each remembered under a hash of everything it depends on.

<output_dir>/plans/compiled/<key>/request.json, program.hlo   what was asked
                                 answer.json                   seconds, memory or the compiler's complaint; written last
                                 optimized.hlo                 the TPU's program
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.planning.compiler import ANSWER, OPTIMIZED, PROGRAM, REQUEST, Memory, environment, versions
from tpu_experiments.planning.trace import Lowered

NOISE = ("TPU worker", "accelerator type", "InitGoogle", "libtpu_init_utils", "Source Location Trace", "host bounds")
"""In lines that libtpu writes because there is no TPU."""


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a program, or what it said against it."""

    name: str
    seconds: float
    """Of the compilation on this machine, when it was first done."""
    memory: Memory | None
    error: str | None
    versions: dict[str, str]
    folder: Path
    is_remembered: bool

    def optimized_hlo(self) -> str:
        """The TPU's program as text."""
        return (self.folder / OPTIMIZED).read_text()


def compile_program(program: Lowered, *, hw: HwConfig, topology: str, folder: str) -> Compiled:
    """Compile for `topology`, or find the answer of an earlier time.

    Raises:
        ConfigError: the process of the compiler ended without an answer, as when the system is out of memory.
    """
    flags = " ".join(hw.libtpu_flags)
    request = {
        "topology": topology,
        "num_chips": program.num_partitions * program.num_replicas,
        "num_partitions": program.num_partitions,
        "num_replicas": program.num_replicas,
        "arguments": [asdict(argument) for argument in program.arguments],
    }
    facts = json.dumps({"request": request, "flags": flags, "versions": versions()}, sort_keys=True)
    key = hashlib.sha256(facts.encode() + program.hlo).hexdigest()[:16]
    place = Path(folder) / key
    known = (place / ANSWER).exists()
    if not known:
        place.mkdir(parents=True, exist_ok=True)
        (place / PROGRAM).write_bytes(program.hlo)
        (place / REQUEST).write_text(json.dumps(request))
        _run_compiler(place, flags=flags, what=f"{program.name} of {'x'.join(map(str, program.shape))} for {topology}")
    answer: dict[str, Any] = json.loads((place / ANSWER).read_text())
    memory = Memory(**answer["memory"]) if "memory" in answer else None
    return Compiled(
        program.name, answer.get("seconds", 0.0), memory, answer.get("error"), answer["versions"], place, known
    )


def _run_compiler(place: Path, *, flags: str, what: str) -> None:
    given = os.environ | environment() | {"LIBTPU_INIT_ARGS": flags}
    command = [sys.executable, "-m", "tpu_experiments.planning.compiler", str(place)]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    if (place / ANSWER).exists():
        return
    if done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL):
        raise ConfigError(
            f"task=plan; the compilation of {what} was killed, as a machine does that is out of memory; close other "
            "programs, lower plan.workers, or plan on a machine with more memory (24 GB suffice for 7B); what is "
            "compiled so far is kept."
        )
    said = [line for line in done.stderr.splitlines() if line.strip() and not any(part in line for part in NOISE)]
    raise ConfigError(
        f"task=plan; the compilation of {what} ended with exit code {done.returncode}: "
        f"{said[-1] if said else 'silent'}; check hw.libtpu_flags (libtpu aborts on a flag it does not know), that "
        "libtpu is installed (the tpu extra), or try a smaller trainer.micro_batch_rows."
    )
