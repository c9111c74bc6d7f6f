"""From a traced and a compiled program to what the plan says of memory and work."""

import math
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.planning.compiled import Compiled
from tpu_experiments.planning.hlo import ProgramCost
from tpu_experiments.planning.oom import classify, read_out_of_memory
from tpu_experiments.planning.plan import ChipMemory, LargeBuffer, Shortage, chip_limit_gib
from tpu_experiments.planning.timing import KernelWork, StepWork, Transfer
from tpu_experiments.planning.trace import BATCH, Argument, Lowered
from tpu_experiments.planning.work import GIB

ITEM_BYTES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "float64": 8, "bool": 1, "uint8": 1}


def class_of(argument: Argument) -> str:
    """What an argument is, for the table of memory."""
    if argument.name.startswith(BATCH) or not argument.name:
        return "batch"
    if argument.alias is None:
        return "base weights"
    if "/" in argument.name:
        return "optimizer state"
    return "adapters" if argument.name.endswith(("lora_A", "lora_B")) else "trained weights"


def argument_classes(program: Lowered) -> dict[str, float]:
    """GiB per chip of every class of arguments, without the padding that the compiler adds."""
    classes: defaultdict[str, float] = defaultdict(float)
    for argument in program.arguments:
        split = program.num_partitions if any(argument.axes) else 1
        classes[class_of(argument)] += math.prod(argument.shape) * ITEM_BYTES[argument.dtype] / split
    return {name: size / GIB for name, size in classes.items()}


def chip_memory(program: Lowered, compiled: Compiled, *, hw: HwConfig) -> ChipMemory:
    """Memory of a program that compiled, or what the compiler's complaint says of one that did not."""
    limit = chip_limit_gib(hw)
    classes = argument_classes(program)
    if compiled.memory is None:
        arguments = sum(classes.values())
        used = read_out_of_memory(compiled.error or "").used_gib
        return ChipMemory(arguments, max(0.0, used - arguments), 0.0, limit, classes)
    memory = compiled.memory
    temporaries = (memory.temporaries + memory.code) / GIB
    classes |= {"activations and temporaries": temporaries}
    own = (memory.outputs - memory.aliased) / GIB
    return ChipMemory(memory.arguments / GIB, temporaries, own, limit, classes)


def shortage_of(
    compiled: Compiled, memory: ChipMemory, *, arch: Any, rows: int, seq_len: int, remedies: tuple[str, ...]
) -> Shortage | None:
    """Why a program does not fit; None where it does."""
    if compiled.error is None:
        if memory.headroom >= 0:
            return None
        message = f"compiled, but arguments, temporaries and outputs together take {memory.total:.2f} GiB"
        return Shortage(message, memory.total, memory.limit, remedies=remedies)
    report = read_out_of_memory(compiled.error)
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
    first = next(line for line in compiled.error.splitlines() if "memory" in line)
    return Shortage(first, report.used_gib, report.limit_gib, buffers, remedies)


def step_work(cost: ProgramCost, *, model_flops: float, tokens: int) -> StepWork:
    """What the program does on one chip, as `timing.step_time` takes it."""
    return StepWork(
        cycles=cost.cycles,
        dot_flops=cost.dot_flops,
        model_flops=model_flops,
        tokens=tokens,
        kernels=tuple(
            KernelWork(k.name, k.count, float(k.stated_flops or 0), k.operand_bytes + k.output_bytes)
            for k in cost.kernels
        ),
        transfers=tuple(Transfer(c.kind, c.count, c.bytes, c.num_overlapped, c.group_size) for c in cost.collectives),
    )
