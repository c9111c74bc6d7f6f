"""Collectives of an HLO program: kind, bytes, number of chips, and whether computation hides them."""

import re

from tpu_experiments.planning.hlo.text import Computation, Instruction, Module, Shape, Transfer

KINDS: tuple[str, ...] = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)
KINDS += ("collective-broadcast",)
COMPUTES = {"while", "call", "conditional"}
CHANNEL = r"\bchannel_id=(\d+)"
ASYNC_START, ASYNC_DONE = 'custom_call_target="AsyncCollectiveStart"', 'custom_call_target="AsyncCollectiveDone"'


def transfers_of(instruction: Instruction, *, within: Computation, module: Module) -> list[Transfer]:
    """Return the collectives that an instruction of a scheduled computation starts.

    On a TPU a collective occurs alone (`all-reduce`), as a start and a done, wrapped in `async-start`, as a kernel of
    its own (a fusion of all-reduce and slice is a reduce-scatter), or spread over a chain of fusions that compute
    beside it (AsyncCollectiveStart, several async_collective_fusion, AsyncCollectiveDone): the chain counts once, at
    its start.
    """
    kind = instruction.opcode.removesuffix("-start")
    if kind in KINDS:
        hidden = kind != instruction.opcode and is_overlapped(instruction, within=within)
        return [described(instruction, kind=kind, within=within, module=module, hidden=hidden)]
    found = []
    for inner in module.callees(instruction) if instruction.opcode in {"fusion", "async-start"} else []:
        for collective in inner.instructions:
            kind = collective.opcode.removesuffix("-start")
            if kind not in KINDS or is_continuation(collective, within=inner):
                continue
            if kind == "all-reduce" and instruction.opcode == "fusion" and "dynamic-slice" in inner.opcodes:
                kind = "reduce-scatter"
            if in_chain(collective):
                hidden = is_chain_overlapped(instruction, collective=collective, within=within, module=module)
            else:
                hidden = instruction.opcode == "async-start" and is_overlapped(instruction, within=within)
            found.append(described(collective, kind=kind, within=inner, module=module, hidden=hidden))
    return found


def in_chain(collective: Instruction) -> bool:
    """Return whether a collective is part of a chain of fusions."""
    return "async_collective_fusion_config" in collective.attributes


def is_continuation(collective: Instruction, *, within: Computation) -> bool:
    """Return whether a collective is a later part of a chain that began in another fusion."""
    starts = (i for i in within.instructions if ASYNC_START in i.attributes)
    return in_chain(collective) and not any(collective.name in start.operands for start in starts)


def described(instruction: Instruction, *, kind: str, within: Computation, module: Module, hidden: bool) -> Transfer:
    """Describe one collective; its bytes exclude the padding of tiles.

    They are those of the result for a gather, of the operands for all others.
    """
    read = within.operand_shapes(instruction)
    num_bytes = sum(shape.num_bytes for shape in read)
    if kind == "all-gather":
        num_bytes = result_bytes(instruction, read=read)
    size = group_size(instruction, num_devices=module.num_devices)
    return Transfer(kind, 1, num_bytes, int(hidden), size, overlapped_bytes=num_bytes if hidden else 0)


def result_bytes(instruction: Instruction, *, read: tuple[Shape, ...]) -> int:
    """Return the bytes gathered; the tuple of an `all-gather-start` begins with the operands."""
    skipped = len(read) if instruction.opcode.endswith("-start") else 0
    return sum(shape.num_bytes for shape in instruction.shapes[skipped : skipped + len(read)])


def group_size(instruction: Instruction, *, num_devices: int) -> int:
    """Return how many chips exchange with each other.

    2 in `replica_groups={{0,1},{2,3}}`, 4 in `[2,4]<=[8]`, a ring's length in a permutation. Empty groups mean all
    devices of the program.
    """
    pairs = instruction.attribute(r"source_target_pairs=\{(\{[\d,{}]*\})\}")
    if pairs:
        return ring_length(dict((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs)))
    iota = instruction.attribute(r"replica_groups=\[\d+,(\d+)\]")
    listed = instruction.attribute(r"replica_groups=\{\{([\d,]+)\}")
    return int(iota) if iota else len(listed.split(",")) if listed else num_devices


def ring_length(targets: dict[int, int]) -> int:
    """Return the chips on the longest path of data when the permutation is applied repeatedly."""
    longest = 0
    for start in targets:
        seen, at = {start}, targets[start]
        while at in targets and at not in seen:
            seen.add(at)
            at = targets[at]
        longest = max(longest, len(seen | {at}))
    return longest


def is_overlapped(instruction: Instruction, *, within: Computation) -> bool:
    """Return whether anything computes between an asynchronous collective's start and its done.

    The order is that of execution. A collective that ends elsewhere (a loop carries it into its next trip) has until
    the end of the computation.
    """
    names = {instruction.name}
    for later in within.instructions[within.position[instruction.name] + 1 :]:
        if names.intersection(later.operands):
            if later.opcode.endswith("-done"):
                return False
            if later.opcode.endswith("-update"):
                names.add(later.name)
        if computes(later):
            return True
    return False


def is_chain_overlapped(start: Instruction, *, collective: Instruction, within: Computation, module: Module) -> bool:
    """Return whether anything computes inside a chain of fusions, whose parts share a channel."""
    channel = collective.attribute(CHANNEL)
    for later in within.instructions[within.position[start.name] + 1 :]:
        if ends_chain(later, channel=channel, module=module):
            return False
        if computes(later):
            return True
    return False


def computes(instruction: Instruction) -> bool:
    """Return whether an instruction keeps the chip's units busy.

    It does with an estimate of cycles, as a loop or call, or as a Pallas kernel.
    """
    is_kernel = instruction.opcode == "custom-call" and "tpu_custom_call" in instruction.attributes
    return instruction.estimated_cycles > 0 or instruction.opcode in COMPUTES or is_kernel


def ends_chain(instruction: Instruction, *, channel: str | None, module: Module) -> bool:
    """Return whether this fusion is the last of the chain on the channel."""
    if instruction.opcode != "fusion":
        return False
    lines = [i for inner in module.callees(instruction) for i in inner.instructions]
    done = any(ASYNC_DONE in i.attributes for i in lines)
    return done and any(i.attribute(CHANNEL) == channel for i in lines if in_chain(i))
