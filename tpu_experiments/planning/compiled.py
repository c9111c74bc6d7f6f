"""Compilations in separate processes, each cached under a hash of everything it depends on.

<output_dir>/plans/compiled/<key>/request.json, program.hlo   the request
                                 answer.json                   seconds, and memory or the error; written last
                                 optimized.hlo                 the TPU's program
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.planning import complaints
from tpu_experiments.planning.compiler import ANSWER, OPTIMIZED, PROGRAM, REQUEST, Memory, environment, versions
from tpu_experiments.planning.oom import OutOfMemory, is_out_of_memory, read_out_of_memory
from tpu_experiments.planning.trace import Lowered

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compiled:
    """The compiler's answer for a program: its memory, or its report that it does not fit into HBM."""

    name: str
    seconds: float
    """Seconds of the compilation on this machine, when it was first done."""
    memory: Memory | None
    out_of_memory: OutOfMemory | None
    """Set where `memory` is None."""
    versions: dict[str, str]
    folder: Path
    is_remembered: bool

    def optimized_hlo(self) -> str:
        """Return the TPU's program as text."""
        return (self.folder / OPTIMIZED).read_text()


class Compilers:
    """Concurrent compilers; leaving the block by an exception kills them."""

    def __init__(self, workers: int) -> None:
        self.pool = ThreadPoolExecutor(workers)
        self.running: set[subprocess.Popen[str]] = set()
        self.futures: dict[str, Future[Compiled]] = {}

    def __enter__(self) -> "Compilers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.stop()
        self.pool.shutdown()

    def stop(self) -> None:
        """Kill the running compilers, and start no other."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in list(self.running):
            process.kill()

    def submit(self, program: Lowered, *, hw: HwConfig, folder: str) -> Future[Compiled]:
        """Compile as soon as a worker is free, or return the cached answer; raises what `compile` does."""
        request = {
            "topology": hw.topology,
            "num_chips": program.num_partitions * program.num_replicas,
            "mesh": asdict(program.mesh),
            "num_replicas": program.num_replicas,
            "arguments": [asdict(argument) for argument in program.arguments],
        }
        facts = {"request": request, "flags": " ".join(hw.libtpu_flags), "versions": versions()}
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode() + program.hlo).hexdigest()[:16]
        if key not in self.futures:
            log.info("%s of %s: traced in %.1f s", program.name, shown(program), program.trace_seconds)
            place = Path(folder) / key
            self.futures[key] = self.pool.submit(self.compile, program, request=request, hw=hw, place=place)
        return self.futures[key]

    def compile(self, program: Lowered, *, request: dict[str, Any], hw: HwConfig, place: Path) -> Compiled:
        """Return the answer to one request, from the cache where it is there.

        Raises:
            ConfigError: the compiler refused the program for another reason than its HBM, or ended without an answer,
                as when the system is out of memory; such failures are not cached.
        """
        what = f"{program.name} of {shown(program)} for {hw.topology}"
        if place.is_symlink():
            raise ConfigError(f"{place}; it is a symbolic link, and files are written there; remove the link.")
        known = (place / ANSWER).exists()
        if not known:
            place.mkdir(parents=True, exist_ok=True)
            (place / PROGRAM).write_bytes(program.hlo)
            (place / REQUEST).write_text(json.dumps(request))
            self._run(place, flags=" ".join(hw.libtpu_flags), what=what)
        answer: dict[str, Any] = json.loads((place / ANSWER).read_text())
        memory = Memory(**answer["memory"]) if "memory" in answer else None
        shortage = None if memory else _shortage(answer, hw=hw, place=place, what=what)
        log.info("%s: compiled in %.0f s%s", what, answer["seconds"], ", on an earlier occasion" if known else "")
        return Compiled(program.name, answer["seconds"], memory, shortage, answer["versions"], place, known)

    def _run(self, place: Path, *, flags: str, what: str) -> None:
        given = os.environ | environment() | {"LIBTPU_INIT_ARGS": flags}
        command = [sys.executable, "-m", "tpu_experiments.planning.compiler", str(place)]
        process = subprocess.Popen(command, env=given, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.running.add(process)
        _, stderr = process.communicate()
        self.running.discard(process)
        if not (place / ANSWER).exists():
            raise complaints.about_process(process.returncode, stderr=stderr, what=what)


def shown(program: Lowered) -> str:
    """Format the shape of a program's batch, for example `1x4x2048`."""
    return "x".join(map(str, program.shape))


def _shortage(answer: dict[str, Any], *, hw: HwConfig, place: Path, what: str) -> OutOfMemory:
    """Return the report of a program that does not fit; any other error is raised and not cached."""
    said = answer["error"]
    report = read_out_of_memory(said) if is_out_of_memory(said) else None
    if report is not None and report.memory_space == "hbm":
        return report
    (place / ANSWER).unlink(missing_ok=True)
    if answer["stage"] == "topology":
        raise complaints.about_topology(hw, said=said)
    if report is not None:
        raise complaints.about_kernel_memory(report, what=what)
    raise complaints.about_program(said, what=what)
