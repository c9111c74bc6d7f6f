"""Compilations in processes of their own, each remembered under a hash of everything it depends on, and what they say.

<output_dir>/plans/compiled/<key>/request.json, program.hlo   what was asked
                                 program.mlir                  the program for another environment's compiler
                                 answer.json                   seconds, memory or the complaint about it; written last
                                 optimized.hlo                 the TPU's program
                                 facts.json, executable        what a run by TorchTPU loads (runtime/tpu/planned.py)"""

import hashlib
import json
import logging
import math
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import LIBTPU_INIT_ARGS, HwConfig, flags_of
from tpu_experiments.config.mesh import Mesh
from tpu_experiments.metrics.flops import FlopsPerToken
from tpu_experiments.planning import oom
from tpu_experiments.planning.compiler import (
    ANSWER,
    ENVIRONMENT,
    OPTIMIZED,
    ORDER,
    PROGRAM,
    REQUEST,
    SPLIT_RESULTS,
    Memory,
    environment,
    versions,
    versions_in,
)
from tpu_experiments.planning.hlo.kernels import with_flops
from tpu_experiments.planning.hlo.parts import Widths, seconds_by_part, widths_of
from tpu_experiments.planning.hlo.program import ProgramCost, read_program
from tpu_experiments.planning.oom import OutOfMemory, classify, is_out_of_memory, read_out_of_memory
from tpu_experiments.planning.plan import ChipMemory, LargeBuffer, Shortage, chip_limit_gib
from tpu_experiments.planning.stored_plans import COUNTED
from tpu_experiments.planning.timing import StepTime, StepWork, calibration_of, step_time
from tpu_experiments.planning.work import GIB
from tpu_experiments.runtime.lowered import BATCH, Argument, Lowered
from tpu_experiments.runtime.processes.env import exported_flags
from tpu_experiments.runtime.sharding import ABSMAX
from tpu_experiments.runtime.stacked import is_adapter_part

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

    @property
    def libtpu(self) -> str:
        """Version of the compiler."""
        return self.versions.get("libtpu", "unknown")

    def optimized_hlo(self) -> str:
        """Return the TPU's program as text."""
        return (self.folder / OPTIMIZED).read_text()


COMPILER = ("libtpu", "jax")
"""Packages whose versions are those of the environment that compiles."""


class Compilers:
    """Concurrent compilers; leaving the block by an exception kills them.

    Args:
        libtpu: folder of the environment whose libtpu compiles (task.libtpu); None is this one.
    """

    def __init__(self, workers: int, *, libtpu: str | None = None) -> None:
        self.pool = ThreadPoolExecutor(workers)
        self.libtpu = libtpu
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

    def submit(
        self, program: Lowered, *, hw: HwConfig, folder: str, order: Sequence[int] | None = None
    ) -> Future[Compiled]:
        """Compile as soon as a worker is free, or return the cached answer; raises what `compile` does.

        Args:
            order: chips in the order of the program's partitions; None is the topology's own.
        """
        request = {
            "topology": hw.topology,
            "num_chips": program.num_partitions * program.num_replicas,
            "mesh": asdict(program.mesh),
            "num_replicas": program.num_replicas,
            **({"form": program.form} if program.form != "hlo" else {}),
            **({SPLIT_RESULTS: True} if program.has_split_results else {}),
            **({ENVIRONMENT: self.libtpu} if self.libtpu else {}),
            **({ORDER: list(order)} if order is not None else {}),
            "arguments": [asdict(argument) for argument in program.arguments],
        }
        facts = {
            "counted": COUNTED,
            "request": request,
            "flags": " ".join(flags_of(hw, exported=exported_flags())),
            "versions": versions_in(self.libtpu) if self.libtpu else versions(),
        }
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode() + program.module).hexdigest()[:16]
        if key not in self.futures:
            if order is None:
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
            (place / PROGRAM).write_bytes(program.module)
            (place / REQUEST).write_text(json.dumps(request))
            self._run(place, flags=" ".join(flags_of(hw, exported=exported_flags())), what=what)
        answer: dict[str, Any] = json.loads((place / ANSWER).read_text())
        memory = Memory(**answer["memory"]) if "memory" in answer else None
        shortage = None if memory else _shortage(answer, hw=hw, place=place, what=what)
        log.info("%s: compiled in %.0f s%s", what, answer["seconds"], ", from the cache" if known else "")
        used: dict[str, str] = answer["versions"]
        if self.libtpu:  # lowered here, compiled there
            used = {name: used.get(name, "") if name in COMPILER else number for name, number in versions().items()}
        return Compiled(program.name, answer["seconds"], memory, shortage, used, place)

    def _run(self, place: Path, *, flags: str, what: str) -> None:
        given = os.environ | environment() | {LIBTPU_INIT_ARGS: flags}
        command = [sys.executable, "-m", "tpu_experiments.planning.compiler", str(place)]
        process = subprocess.Popen(command, env=given, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.running.add(process)
        _, stderr = process.communicate()
        self.running.discard(process)
        if not (place / ANSWER).exists():
            raise oom.compiler_ended(process.returncode, stderr=stderr, what=what)


def shown(program: Lowered) -> str:
    """Format the shape of a program's batch, for example `1x4x2048`."""
    return "x".join(map(str, program.shape))


def _shortage(answer: dict[str, Any], *, hw: HwConfig, place: Path, what: str) -> OutOfMemory:
    """Return the report of a program that does not fit; any other error is raised and not cached."""
    error_text = answer["error"]
    report = read_out_of_memory(error_text) if is_out_of_memory(error_text) else None
    if report is not None and report.memory_space == "hbm":
        return report
    (place / ANSWER).unlink(missing_ok=True)
    if answer["stage"] == "topology":
        raise oom.unknown_topology(hw, error_text=error_text)
    if answer["stage"] == "text":
        raise oom.unread_program(error_text, versions=answer["versions"], what=what)
    if report is not None:
        raise oom.kernel_too_large(report, what=what)
    raise oom.refused_program(error_text, what=what)


ITEM_BYTES = {
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "float64": 8,
    "bool": 1,
    "uint8": 1,
    "int8": 1,
}


@dataclass(frozen=True)
class Planned:
    """One program of the run, compiled and analysed."""

    name: str
    shape: tuple[int, ...]
    """Shape of the batch's token ids."""
    compiled: Compiled
    memory: ChipMemory
    flops: FlopsPerToken | None = None
    """FLOPs per token of training; None for other programs."""
    cycles_by_class: dict[str, int] = field(default_factory=dict)
    work: StepWork | None = None
    time: StepTime | None = None
    """Time of one run of the program; None where it does not fit."""
    seconds_by_part: dict[str, float] = field(default_factory=dict)
    """Seconds of one training step by what the work is for (parts.PARTS), before the calibration."""
    notes: tuple[str, ...] = ()


TELLING_BYTES = GIB // 10
"""Fewer random bytes are not noted: a v5e writes as many in 0.1 ms."""


def planned(
    program: Lowered,
    compiled: Compiled,
    *,
    hw: HwConfig,
    trained: Collection[str],
    flops: FlopsPerToken | None = None,
    widths: Widths | None = None,
) -> Planned:
    """Analyse one compiled program.

    Args:
        trained: names of the trainable parameters.
        flops: FLOPs per token of training; without it no utilisation is reported.
        widths: sizes that identify the parts of a training step; without it no parts are reported.
    """
    memory = chip_memory(program, compiled, hw=hw, trained=trained)
    if compiled.memory is None:
        return Planned(program.name, program.shape, compiled, memory, flops)
    cost = read_program(compiled.optimized_hlo(), widths=widths)
    tokens = program.num_adapters * math.prod(program.shape) // program.num_partitions
    work, notes = step_work(cost, model_flops=flops.model * tokens if flops else 0.0, tokens=tokens)
    assert hw.chip is not None
    time = step_time(work, chip=hw.chip, topology=hw.topology, calibration=calibration_of(hw, libtpu=compiled.libtpu))
    by_part = seconds_by_part(cost.cycles_by_part, time=time, chip=hw.chip) if widths else {}
    return Planned(
        program.name, program.shape, compiled, memory, flops, cost.cycles_by_class, work, time, by_part, notes
    )


def widths_of_step(program: Lowered, arch: Any, *, ranks: Collection[int], trained: Collection[str]) -> Widths:
    """Return the sizes by which the parts of a training step are identified."""
    mesh = program.mesh
    elements = {elements_of_chip(a, mesh=mesh) for a in program.arguments if a.name in trained or ABSMAX in a.name}
    splits = {mesh.fsdp, mesh.tensor, mesh.fsdp * mesh.tensor}
    return widths_of(arch, ranks=ranks, seq_len=program.shape[-1], trained=elements, splits=splits)


def elements_of_chip(argument: Argument, *, mesh: Mesh) -> int:
    """Return how many elements of an argument one chip holds."""
    return math.prod(argument.shape) // mesh.parts(argument.axes)


def class_of(argument: Argument, *, trained: Collection[str]) -> str:
    """Return the class of an argument in the table of memory."""
    if argument.name.startswith(BATCH) or not argument.name:
        return "batch"
    if "/" in argument.name:
        return "optimizer state"
    if argument.name not in trained:
        return "base weights"
    return "adapters" if is_adapter_part(argument.name) else "trained weights"


def gib_by_class(arguments: Iterable[Argument], *, program: Lowered, trained: Collection[str]) -> dict[str, float]:
    """Return GiB per chip of every class of arguments, without the compiler's padding."""
    classes: defaultdict[str, float] = defaultdict(float)
    for argument in arguments:
        size = elements_of_chip(argument, mesh=program.mesh) * ITEM_BYTES[argument.dtype]
        classes[class_of(argument, trained=trained)] += size
    return {name: size / GIB for name, size in classes.items()}


def chip_memory(program: Lowered, compiled: Compiled, *, hw: HwConfig, trained: Collection[str]) -> ChipMemory:
    """Return the memory during a program, or what the compiler reports of one that does not fit.

    Arrays that are resident on the chip and not read by the program (the optimizer's state during an evaluation) count
    as well.
    """
    limit = chip_limit_gib(hw)
    classes = gib_by_class([*program.arguments, *program.resident], program=program, trained=trained)
    idle = sum(gib_by_class(program.resident, program=program, trained=trained).values())
    report = compiled.out_of_memory
    if report is not None:
        temporaries = max(0.0, report.used_gib - report.arguments_gib)
        arguments = max(report.arguments_gib, sum(classes.values()))  # with padding, where the report lists them
        return ChipMemory(arguments, temporaries, 0.0, limit, classes)
    memory = compiled.memory
    assert memory is not None
    temporaries = (memory.temporaries + memory.code) / GIB
    classes |= {"activations and temporaries": temporaries}
    own = (memory.outputs - memory.aliased) / GIB
    return ChipMemory(memory.arguments / GIB + idle, temporaries, own, limit, classes)


def shortage_of(made: Planned, *, arch: Any, rows: int, seq_len: int, remedies: tuple[str, ...]) -> Shortage | None:
    """Return why a program does not fit; None where it does."""
    report, memory = made.compiled.out_of_memory, made.memory
    if report is None:
        if memory.headroom >= 0:
            return None
        message = f"compiled, but arguments, temporaries and outputs together take {memory.total:.2f} GiB"
        return Shortage(message, memory.total, memory.limit, remedies=remedies)
    sizes = {
        "vocab_size": arch.vocab_size,
        "hidden": arch.hidden_size,
        "intermediate": arch.intermediate_size,
        "heads": arch.num_attention_heads,
    }
    counted = Counter(
        LargeBuffer(b.bytes, str(b), classify(b, seq_len=seq_len, rows=rows, **sizes)) for b in report.buffers
    )
    buffers = tuple(replace(buffer, count=count) for buffer, count in counted.items())
    return Shortage(report.message, max(report.used_gib, memory.total), report.limit_gib, buffers, remedies)


def step_work(cost: ProgramCost, *, model_flops: float, tokens: int) -> tuple[StepWork, tuple[str, ...]]:
    """Return what a program does on one chip, and notes on what was assumed of it."""
    kernels, notes = with_flops(cost.kernels)
    work = StepWork(cost.cycles, cost.dot_flops, model_flops, tokens, kernels, cost.transfers)
    if cost.random_bytes >= TELLING_BYTES:
        note = f"{cost.random_bytes / GIB:.2f} GiB of random numbers a step: the compiler estimates no time for them"
        notes = (*notes, note)
    if cost.host_bytes:
        note = f"{cost.host_bytes / GIB:.2f} GiB per step are transferred to and from host memory"
        notes = (*notes, f"{note}, assumed to be hidden behind the computation")
    return work, notes
