"""What a compiled TPU program does in one run: cycles, FLOPs, Pallas kernels, collectives, loops. Text in, numbers out.

`cost_analysis()` of the executable counts a loop's body once and gives a negative time; so the optimised HLO is walked
and everything inside a loop is multiplied by how often the loop runs.
"""

import base64
import binascii
import re
from collections import Counter
from dataclasses import dataclass, field, replace

from tpu_experiments.planning.hlo_collectives import transfers_of
from tpu_experiments.planning.hlo_flops import dot_flops
from tpu_experiments.planning.hlo_scalars import Scope, trip_count
from tpu_experiments.planning.hlo_text import Computation, Instruction, Module, read_module

MATMUL = {"dot", "convolution"}
GATHER_SCATTER = {"gather", "scatter"}
REDUCE = {"reduce", "reduce-window", "select-and-scatter"}
COPY = {
    "bitcast",
    "broadcast",
    "concatenate",
    "copy",
    "dynamic-slice",
    "dynamic-update-slice",
    "iota",
    "pad",
    "reshape",
}
COPY |= {"reverse", "slice", "transpose"}
SILENT = {"constant", "fusion", "get-tuple-element", "parameter", "partition-id", "replica-id", "tuple"}
OTHER = {"custom-call", "fft", "rng", "rng-bit-generator", "sort", "while"}
CLASSES = ("matmul", "elementwise", "copy", "reduce", "gather_scatter", "other")


@dataclass(frozen=True)
class Kernel:
    """One Pallas kernel; calls with the same name and shapes are counted together."""

    name: str
    """The Python function that built it, or `tpu_custom_call` where the kernel does not tell."""
    count: int
    """Calls in one run of the program, per chip."""
    operand_shapes: tuple[str, ...]
    """What one call reads, for example `bf16[1,32,2048,128]`."""
    output_shapes: tuple[str, ...]
    """What one call writes."""
    operand_bytes: int
    """Bytes of the operands of one call, each read once."""
    output_bytes: int
    """Bytes of the results of one call."""
    stated_flops: int | None
    """FLOPs of one call as the kernel's author states them (causal masks are usually left out); None where not."""


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind over groups of one size."""

    kind: str
    """`all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all`, `collective-permute`, ..."""
    count: int
    """In one run of the program, per chip."""
    bytes: int
    """In one run of the program, per chip: of the result for all-gather, of the operand for the others."""
    num_overlapped: int
    """Of `count`: asynchronous, with compute between start and end."""
    overlapped_bytes: int
    """Of `bytes`: of those."""
    group_size: int
    """Chips that exchange with each other."""


@dataclass(frozen=True)
class Loop:
    """One loop; it runs as often as the loops around it say."""

    name: str
    trip_count: int
    cycles: int
    """Estimated cycles of one trip, loops inside multiplied out."""


@dataclass(frozen=True)
class ProgramCost:
    """One run of a program on one chip."""

    cycles: int
    """Sum of the TPU compiler's `estimated_cycles`; Pallas kernels and collectives have none."""
    cycles_by_class: dict[str, int]
    """The same by what the operation holds: `matmul`, `elementwise`, `copy`, `reduce`, `gather_scatter`, `other`."""
    dot_flops: int
    """FLOPs of matrix products outside Pallas kernels."""
    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...]
    loops: tuple[Loop, ...]
    entry_parameters: int
    """Arguments of the program."""


@dataclass
class Tally:
    """Running sums of a computation and what it calls."""

    cycles: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    kernels: Counter[Kernel] = field(default_factory=Counter)
    moved: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    loops: dict[str, Loop] = field(default_factory=dict)

    def add(self, other: "Tally", *, times: int = 1) -> None:
        """Another computation's sums, so many times."""
        self.cycles.update({key: number * times for key, number in other.cycles.items()})
        self.kernels.update({key: number * times for key, number in other.kernels.items()})
        self.moved.update({key: number * times for key, number in other.moved.items()})
        self.flops += other.flops * times
        self.loops |= other.loops

    def move(self, kind: str, size: int, *, num_bytes: int, is_overlapped: bool) -> None:
        """One collective."""
        seen = {"count": 1, "bytes": num_bytes}
        seen |= {"num_overlapped": 1, "overlapped_bytes": num_bytes} if is_overlapped else {}
        self.moved.update({(kind, size, what): number for what, number in seen.items()})


def read_program(hlo: str) -> ProgramCost:
    """Costs from optimised TPU HLO text (`executable.hlo_modules()[0].to_string()`), per chip and run.

    ValueError where a loop's trip count cannot be told (it names the loop) or the text is no HLO module. Of a
    conditional the branch with most cycles counts.
    """
    module = read_module(hlo)
    entry = Scope(module, computation=module.entry, argument=lambda number, index: None)
    tally = tally_of(entry)
    return ProgramCost(
        cycles=sum(tally.cycles.values()),
        cycles_by_class={name: tally.cycles[name] for name in CLASSES},
        dot_flops=tally.flops,
        kernels=tuple(replace(kernel, count=count) for kernel, count in tally.kernels.items()),
        collectives=tuple(collectives(tally)),
        loops=tuple(tally.loops.values()),
        entry_parameters=sum(i.opcode == "parameter" for i in module.entry.instructions),
    )


def tally_of(scope: Scope) -> Tally:
    """Sums of one computation in the scope it is called in."""
    tally = Tally()
    for instruction in scope.computation.instructions:
        add_own(tally, instruction, within=scope.computation, module=scope.module)
        if instruction.opcode == "while":
            body = tally_of(scope.loop_body(instruction))
            trips = trip_count(instruction, scope=scope)
            cycles = sum(body.cycles.values())
            tally.add(body, times=trips)
            tally.loops[instruction.name] = Loop(name=instruction.name, trip_count=trips, cycles=cycles)
        elif instruction.opcode == "conditional":
            branches = [tally_of(branch) for branch in branch_scopes(scope, instruction)]
            tally.add(max(branches, key=lambda branch: sum(branch.cycles.values())))
        elif instruction.opcode in {"call", "async-start"}:
            for computation in scope.module.callees(instruction):
                inner = tally_of(scope.inside(instruction, computation))
                if instruction.opcode == "async-start":
                    inner.moved.clear()  # add_own has counted it, and knows whether compute hides it
                tally.add(inner)
    return tally


def add_own(tally: Tally, instruction: Instruction, *, within: Computation, module: Module) -> None:
    """What one instruction does itself, what is fused into it included."""
    holders = [(instruction, within), *fused(instruction, module=module)]
    if instruction.estimated_cycles:
        tally.cycles[class_of({held.opcode for held, _ in holders})] += instruction.estimated_cycles
    for held, holder in holders:
        tally.flops += dot_flops(held, within=holder)
        if held.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in held.attributes:
            tally.kernels[kernel_of(held, within=holder)] += 1
    for transfer in transfers_of(instruction, within=within, module=module):
        hidden = transfer.is_overlapped
        tally.move(transfer.kind, transfer.group_size, num_bytes=transfer.num_bytes, is_overlapped=hidden)


def fused(instruction: Instruction, *, module: Module) -> list[tuple[Instruction, Computation]]:
    """Everything inside a fusion, fusions in it included; nothing of other instructions."""
    if instruction.opcode != "fusion":
        return []
    found = []
    for computation in module.callees(instruction):
        for inner in computation.instructions:
            found += [(inner, computation), *fused(inner, module=module)]
    return found


def class_of(opcodes: set[str]) -> str:
    """The class of an operation that holds these: the most telling one wins."""
    for name, members in (("matmul", MATMUL), ("gather_scatter", GATHER_SCATTER), ("reduce", REDUCE)):
        if opcodes & members:
            return name
    if opcodes & OTHER:
        return "other"
    return "elementwise" if opcodes - COPY - SILENT else "copy"


def branch_scopes(scope: Scope, conditional: Instruction) -> list[Scope]:
    """The branches of a conditional, each with its own operand."""

    def branch(computation: Computation, operand: str) -> Scope:
        return Scope(scope.module, computation=computation, argument=lambda _, index: scope.value(operand, index))

    callees = scope.module.callees(conditional)
    return [branch(callee, operand) for callee, operand in zip(callees, conditional.operands[1:], strict=True)]


def kernel_of(call: Instruction, *, within: Computation) -> Kernel:
    """A Pallas custom call, counted once."""
    read = within.operand_shapes(call)
    flops = call.attribute(r'"cost_estimate":\{"flops":"(\d+)"')
    return Kernel(
        name=kernel_name(call),
        count=1,
        operand_shapes=tuple(str(shape) for shape in read),
        output_shapes=tuple(str(shape) for shape in call.shapes),
        operand_bytes=sum(shape.num_bytes for shape in read),
        output_bytes=sum(shape.num_bytes for shape in call.shapes),
        stated_flops=int(flops) if flops else None,
    )


def kernel_name(call: Instruction) -> str:
    """The Python function whose index maps the kernel carries, for example `_flash_attention_bwd_dq`.

    HLO has no name for a kernel; its MLIR (base64 bytecode in `body`) keeps the names of the functions it came from.
    """
    try:
        body = base64.b64decode(call.attribute(r'"body":"([^"]*)"') or "")
    except binascii.Error:
        body = b""
    named = re.search(rb"(\w+)\.<locals>\.\w*index_map", body)
    return named[1].decode() if named else "tpu_custom_call"


def collectives(tally: Tally) -> list[Collective]:
    """The collectives counted, by kind and size of group."""
    groups = dict.fromkeys((kind, size) for kind, size, _ in tally.moved)
    found = []
    for kind, size in groups:
        numbers = {what: tally.moved[kind, size, what] for what in ("count", "bytes")}
        hidden = {what: tally.moved[kind, size, what] for what in ("num_overlapped", "overlapped_bytes")}
        found.append(Collective(kind=kind, group_size=size, **numbers, **hidden))
    return found
