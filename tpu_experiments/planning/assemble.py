"""Memory, work and time of a plan, from traced and compiled programs."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.mesh import Mesh
from tpu_experiments.metrics.flops import FlopsPerToken
from tpu_experiments.planning.compiled import Compiled
from tpu_experiments.planning.hlo import ProgramCost, read_program
from tpu_experiments.planning.kernels import with_flops
from tpu_experiments.planning.oom import classify
from tpu_experiments.planning.parts import Widths, seconds_by_part, widths_of
from tpu_experiments.planning.plan import ChipMemory, LargeBuffer, Shortage, chip_limit_gib
from tpu_experiments.planning.timing import StepTime, StepWork, calibration_of, step_time
from tpu_experiments.planning.trace import BATCH, Argument, Lowered
from tpu_experiments.planning.work import GIB

ITEM_BYTES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "float64": 8, "bool": 1, "uint8": 1}


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
    tokens = math.prod(program.shape) // program.num_partitions
    work, notes = step_work(cost, model_flops=flops.model * tokens if flops else 0.0, tokens=tokens)
    assert hw.chip is not None
    time = step_time(work, chip=hw.chip, topology=hw.topology, calibration=calibration_of(hw))
    by_part = seconds_by_part(cost.cycles_by_part, time=time, chip=hw.chip) if widths else {}
    return Planned(
        program.name, program.shape, compiled, memory, flops, cost.cycles_by_class, work, time, by_part, notes
    )


def widths_of_step(program: Lowered, arch: Any, *, rank: int, trained: Collection[str]) -> Widths:
    """Return the sizes by which the parts of a training step are identified."""
    mesh = program.mesh
    elements = {elements_of_chip(a, mesh=mesh) for a in program.arguments if a.name in trained}
    splits = {mesh.fsdp, mesh.tensor, mesh.fsdp * mesh.tensor}
    return widths_of(arch, rank=rank, seq_len=program.shape[-1], trained=elements, splits=splits)


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
    return "adapters" if argument.name.endswith(("lora_A", "lora_B")) else "trained weights"


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
    if compiled.out_of_memory is not None:
        arguments = sum(classes.values())
        return ChipMemory(arguments, max(0.0, compiled.out_of_memory.used_gib - arguments), 0.0, limit, classes)
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
    return Shortage(report.message, report.used_gib, report.limit_gib, buffers, remedies)


def step_work(cost: ProgramCost, *, model_flops: float, tokens: int) -> tuple[StepWork, tuple[str, ...]]:
    """Return what a program does on one chip, and notes on what was assumed of it."""
    kernels, notes = with_flops(cost.kernels)
    work = StepWork(cost.cycles, cost.dot_flops, model_flops, tokens, kernels, cost.transfers)
    if cost.random_bytes >= TELLING_BYTES:
        told = f"{cost.random_bytes / GIB:.2f} GiB of random numbers a step: the compiler estimates no time for them"
        notes = (*notes, told)
    if cost.host_bytes:
        told = f"{cost.host_bytes / GIB:.2f} GiB a step go to the host's memory and from there, beside the computation"
        notes = (*notes, f"{told}; that the link keeps up is assumed")
    return work, notes
