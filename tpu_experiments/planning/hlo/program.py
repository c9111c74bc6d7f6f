"""What a compiled TPU program does in one run: cycles, FLOPs, Pallas kernels, collectives, loops. Text in, numbers out.

`cost_analysis()` of the executable counts a loop's body once and gives a negative time; so the optimised HLO is
walked and everything inside a loop is multiplied by how often the loop runs."""

import base64
import binascii
import re
from collections import Counter
from dataclasses import dataclass, field, replace

from tpu_experiments.planning.hlo.collectives import transfers_of
from tpu_experiments.planning.hlo.flops import dot_flops
from tpu_experiments.planning.hlo.parts import Widths, part_of
from tpu_experiments.planning.hlo.scalars import Scope, trip_count
from tpu_experiments.planning.hlo.text import Computation, Instruction, Kernel, Module, Transfer, read_module

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
HOST_MOVES = {"dynamic-slice-start", "dynamic-update-slice-start"}
CLASSES = ("matmul", "elementwise", "copy", "reduce", "gather_scatter", "other")


@dataclass(frozen=True)
class Loop:
    """One loop; its trip count is for one entry, whatever loops are around it."""

    name: str
    trip_count: int
    cycles: int
    """Estimated cycles of one trip, loops inside multiplied out."""


@dataclass(frozen=True)
class ProgramCost:
    """Costs of one run of a program on one chip."""

    cycles: int
    """Sum of the TPU compiler's `estimated_cycles`; Pallas kernels and collectives have none."""
    cycles_by_class: dict[str, int]
    """The same by kind of operation: `matmul`, `elementwise`, `copy`, `reduce`, `gather_scatter`, `other`."""
    dot_flops: int
    """FLOPs of matrix products outside Pallas kernels."""
    kernels: tuple[Kernel, ...]
    transfers: tuple[Transfer, ...]
    loops: tuple[Loop, ...]
    random_bytes: int
    """Bytes of random numbers written; the compiler estimates no cycles for them."""
    host_bytes: int
    """Bytes moved to host memory and back, concurrently with computation; without cycles as well."""
    cycles_by_part: dict[str, int] = field(default_factory=dict)
    """The same cycles by part of a training step (parts.PARTS); empty where no widths were given."""


@dataclass
class Tally:
    """Running sums of a computation and its callees."""

    cycles: Counter[str] = field(default_factory=Counter)
    parts: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    silent: Counter[str] = field(default_factory=Counter)
    """Bytes of operations without an estimate: `random` and `host`."""
    kernels: Counter[Kernel] = field(default_factory=Counter)
    transfers: Counter[Transfer] = field(default_factory=Counter)
    """How often each collective runs."""
    loops: dict[str, Loop] = field(default_factory=dict)

    def add(self, other: "Tally", *, times: int = 1) -> None:
        """Add another computation's sums, multiplied by `times`."""
        self.cycles.update({key: number * times for key, number in other.cycles.items()})
        self.parts.update({key: number * times for key, number in other.parts.items()})
        self.kernels.update({key: number * times for key, number in other.kernels.items()})
        self.transfers.update({key: number * times for key, number in other.transfers.items()})
        self.silent.update({key: number * times for key, number in other.silent.items()})
        self.flops += other.flops * times
        self.loops |= other.loops


def read_program(hlo: str, *, widths: Widths | None = None) -> ProgramCost:
    """Read the costs per chip and run from optimised TPU HLO text.

    The text is that of `executable.hlo_modules()[0].to_string()`. Of a conditional the branch with most cycles counts.

    Args:
        widths: sizes of the model whose training step it is; without them `cycles_by_part` is empty.

    Raises:
        ValueError: a loop's trip count is unknown (it names the loop), or the text is no HLO module.
    """
    module = read_module(hlo)
    entry = Scope(module, computation=module.entry, argument=lambda number, index: None)
    tally = tally_of(entry, widths=widths)
    return ProgramCost(
        cycles=sum(tally.cycles.values()),
        cycles_by_class={name: tally.cycles[name] for name in CLASSES},
        dot_flops=tally.flops,
        kernels=tuple(replace(kernel, count=count) for kernel, count in tally.kernels.items()),
        transfers=tuple(summed(tally.transfers)),
        loops=tuple(tally.loops.values()),
        random_bytes=tally.silent["random"],
        host_bytes=tally.silent["host"],
        cycles_by_part=dict(tally.parts),
    )


def tally_of(scope: Scope, *, widths: Widths | None = None) -> Tally:
    """Sum the costs of one computation in the scope it is called in."""
    tally = Tally()
    for instruction in scope.computation.instructions:
        add_own(tally, instruction, within=scope.computation, module=scope.module, widths=widths)
        if instruction.opcode == "while":
            body = tally_of(scope.loop_body(instruction), widths=widths)
            trips = trip_count(instruction, scope=scope)
            cycles = sum(body.cycles.values())
            tally.add(body, times=trips)
            tally.loops[instruction.name] = Loop(name=instruction.name, trip_count=trips, cycles=cycles)
        elif instruction.opcode == "conditional":
            branches = [tally_of(branch, widths=widths) for branch in branch_scopes(scope, instruction)]
            tally.add(max(branches, key=lambda branch: sum(branch.cycles.values())))
        elif instruction.opcode in {"call", "async-start"}:
            for computation in scope.module.callees(instruction):
                inner = tally_of(scope.inside(instruction, computation), widths=widths)
                if instruction.opcode == "async-start":
                    inner.transfers.clear()  # add_own has counted it, and knows whether compute hides it
                tally.add(inner)
    return tally


def add_own(
    tally: Tally, instruction: Instruction, *, within: Computation, module: Module, widths: Widths | None
) -> None:
    """Add the costs of one instruction itself, including what is fused into it."""
    holders = [(instruction, within), *fused(instruction, module=module)]
    if instruction.estimated_cycles:
        tally.cycles[class_of({held.opcode for held, _ in holders})] += instruction.estimated_cycles
    if instruction.estimated_cycles and widths is not None:
        part = part_of(holders, is_entry=within is module.entry, widths=widths)
        tally.parts[part] += instruction.estimated_cycles
    if instruction.opcode == "rng-bit-generator":
        tally.silent["random"] += max(shape.num_bytes for shape in instruction.shapes)
    elif instruction.opcode in HOST_MOVES and "S(5)" in instruction.type_text:
        whole, *others = instruction.shapes  # the stack, then the slice among indices
        tally.silent["host"] += next(s.num_bytes for s in others if len(s.dims) == len(whole.dims))
    for held, holder in holders:
        tally.flops += dot_flops(held, within=holder)
        if held.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in held.attributes:
            tally.kernels[kernel_of(held, within=holder)] += 1
    tally.transfers.update(transfers_of(instruction, within=within, module=module))


def fused(instruction: Instruction, *, module: Module) -> list[tuple[Instruction, Computation]]:
    """Return everything inside a fusion, nested fusions included; empty for other instructions."""
    if instruction.opcode != "fusion":
        return []
    found = []
    for computation in module.callees(instruction):
        for inner in computation.instructions:
            found += [(inner, computation), *fused(inner, module=module)]
    return found


def class_of(opcodes: set[str]) -> str:
    """Return the class of an operation that contains these opcodes.

    The first that occurs decides: matmul, gather_scatter, reduce, other, elementwise, copy.
    """
    for name, members in (("matmul", MATMUL), ("gather_scatter", GATHER_SCATTER), ("reduce", REDUCE)):
        if opcodes & members:
            return name
    if opcodes & OTHER:
        return "other"
    return "elementwise" if opcodes - COPY - SILENT else "copy"


def branch_scopes(scope: Scope, conditional: Instruction) -> list[Scope]:
    """Return the branches of a conditional, each with its own operand."""

    def branch(computation: Computation, operand: str) -> Scope:
        return Scope(scope.module, computation=computation, argument=lambda _, index: scope.value(operand, index))

    callees = scope.module.callees(conditional)
    return [branch(callee, operand) for callee, operand in zip(callees, conditional.operands[1:], strict=True)]


def kernel_of(call: Instruction, *, within: Computation) -> Kernel:
    """Describe one call of a Pallas kernel."""
    read = within.operand_shapes(call)
    flops = call.attribute(r'"cost_estimate":\{"flops":"(\d+)"')
    moved = call.attribute(r'"cost_estimate":\{[^}]*"bytes_accessed":"(\d+)"')
    return Kernel(
        name=kernel_name(call),
        count=1,
        operand_shapes=tuple(str(shape) for shape in read),
        flops=float(flops) if flops else None,
        num_bytes=float(moved) if moved else sum(shape.num_bytes for shape in (*read, *call.shapes)),
    )


def kernel_name(call: Instruction) -> str:
    """Return the Python function that a kernel was built by, for example `_flash_attention_bwd_dq`.

    HLO has no name for a kernel; its MLIR (base64 bytecode in `body`) keeps the names of the index maps, which are
    local to that function. Our own (runtime/kernels/) have a name there, `attention_forward`.
    """
    try:
        body = base64.b64decode(call.attribute(r'"body":"([^"]*)"') or "")
    except binascii.Error:
        body = b""
    named = re.search(rb"\0((?:attention|delta)_\w+ward)\0", body) or re.search(rb"(\w+)\.<locals>\.\w*index_map", body)
    return named[1].decode() if named else "tpu_custom_call"


def summed(transfers: Counter[Transfer]) -> list[Transfer]:
    """Merge transfers into one for every kind and size of group."""
    groups: dict[tuple[str, int], Transfer] = {}
    for once, times in transfers.items():
        key = once.kind, once.group_size
        groups[key] = groups.get(key, Transfer(once.kind, 0, 0, 0, once.group_size)).plus(once, times=times)
    return list(groups.values())
