"""HLO text as computations and instructions, read without jax or torch; Pallas kernels and transfers between chips.

Names and the order of lines are the compiler's own; in a scheduled module (`is_scheduled=true`, every compiled one)
the order is the order of execution."""

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property

# A computation opens with its signature. It closes only at a bare brace in the first column: the metadata of kernels
# can span lines that begin with a brace.
HEAD = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\) -> .*\{\s*$")
END = re.compile(r'^\}(, execution_thread="\w+")?\s*$')
"""The last line of a computation; libtpu 0.0.52 runs some on a chip's sparse core."""
INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)$", re.DOTALL)
OPCODE = re.compile(r"(?<=[)\]}]) ([a-z][\w\-]*)\(")
ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<= ]*)\]")
PARENTHESIS = re.compile(r"[()]")


@dataclass(frozen=True)
class Shape:
    """Element type and dimensions of one array; layout and memory space are left out."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements of the array; 1 of a scalar."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes without the padding of tiles; elements below a byte are packed."""
        return -(-self.num_elements * bits_of(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def bits_of(dtype: str) -> int:
    """Return the bits of one element: `bf16` 16, `f8e4m3fn` 8, `pred` 8 (stored as a byte), `token` 0."""
    if dtype == "pred":
        return 8
    number = re.match(r"[a-z]+(\d+)", dtype)
    return int(number[1]) if number else 0


def shapes_in(text: str) -> tuple[Shape, ...]:
    """Return all arrays named in a type, in order, tuples flattened."""
    found = []
    for dtype, dims in ARRAY.findall(text):
        sizes = tuple(int(size.lstrip("<= ")) for size in dims.split(",") if size.strip())
        found.append(Shape(dtype=dtype, dims=sizes))
    return tuple(found)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation: `name = type opcode(operands), attributes`."""

    name: str
    opcode: str
    type_text: str
    operand_text: str
    attributes: str
    is_root: bool

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of the result; several for a tuple."""
        return shapes_in(self.type_text)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands; none for a constant."""
        return tuple(re.findall(r"%([\w.\-]+)", self.operand_text))

    @cached_property
    def callees(self) -> tuple[str, ...]:
        """Computations that run as part of this instruction (not the tiny ones of `to_apply` in a reduction)."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if listed:
            return tuple(name.strip().lstrip("%") for name in listed[1].split(","))
        key = "to_apply" if self.opcode == "call" else "calls|(?:true|false)_computation|called_computations"
        return tuple(re.findall(rf"\b(?:{key})=\{{?%?([\w.\-]+)", self.attributes))

    @cached_property
    def estimated_cycles(self) -> int:
        """The TPU compiler's own estimate for one execution; 0 where there is none."""
        return sum(int(cycles) for cycles in re.findall(r'"estimated_cycles":"(\d+)"', self.attributes))

    def attribute(self, pattern: str) -> str | None:
        """Return the first group of the pattern in the attributes; None without a match."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None


class Computation:
    """The instructions of one computation, in order and by name, with the position of each."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.instructions: list[Instruction] = []
        self.by_name: dict[str, Instruction] = {}
        self.position: dict[str, int] = {}

    def add(self, instruction: Instruction) -> None:
        """Append an instruction, in the order of the text."""
        self.position[instruction.name] = len(self.instructions)
        self.instructions.append(instruction)
        self.by_name[instruction.name] = instruction

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose result the computation returns."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @cached_property
    def opcodes(self) -> frozenset[str]:
        """Opcodes that occur here, without those of callees."""
        return frozenset(i.opcode for i in self.instructions)

    def operand_shapes(self, instruction: Instruction) -> tuple[Shape, ...]:
        """Return the arrays that an instruction of this computation reads."""
        return tuple(shape for name in instruction.operands for shape in self.by_name[name].shapes)


@dataclass(frozen=True)
class Module:
    """A whole program: its computations and the number of devices it is partitioned over."""

    computations: dict[str, Computation]
    entry: Computation
    num_devices: int

    def callees(self, instruction: Instruction) -> list[Computation]:
        """Return the computations that the instruction runs."""
        return [self.computations[name] for name in instruction.callees]


def read_module(text: str) -> Module:
    """Parse the text of `HloModule.to_string()`.

    Raises:
        ValueError: it has no entry computation, or a line is no instruction.
    """
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    for head, lines in blocks(text):
        computation = Computation(head[2])
        for line in lines:
            computation.add(read_instruction(line))
        computations[computation.name] = computation
        entry = computation if head[1] else entry
    if entry is None:
        raise ValueError(f"hlo=<{len(text)} characters>; no ENTRY computation; give the text of a whole HLO module")
    header = text[: text.find("\n")]
    sizes = [int(size) for size in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)]
    return Module(computations=computations, entry=entry, num_devices=math.prod(sizes))


def blocks(text: str) -> list[tuple[re.Match[str], list[str]]]:
    """Split the text into computations: the match of each head, and its instructions.

    A line that continues an instruction is joined to it.
    """
    found: list[tuple[re.Match[str], list[str]]] = []
    inside = False
    for line in text.splitlines():
        if not inside:
            head = HEAD.match(line)
            inside = head is not None
            if head:
                found.append((head, []))
        elif END.match(line):
            inside = False
        elif INSTRUCTION.match(line):
            found[-1][1].append(line)
        elif found[-1][1]:
            found[-1][1][-1] += "\n" + line
    return found


def read_instruction(line: str) -> Instruction:
    """Parse one instruction.

    Raises:
        ValueError: the line is none; the message quotes it.
    """
    match = INSTRUCTION.match(line)
    opcode = OPCODE.search(match[3]) if match else None
    if match is None or opcode is None:
        raise ValueError(f"hlo line={line[:120]!r}; not an instruction; the printer of XLA may have changed")
    end = closing(match[3], start=opcode.end())
    return Instruction(
        name=match[2],
        opcode=opcode[1],
        type_text=match[3][: opcode.start()],
        operand_text=match[3][opcode.end() : end],
        attributes=match[3][end + 1 :],
        is_root=match[1] is not None,
    )


def closing(text: str, *, start: int) -> int:
    """Return the position of the parenthesis that closes the one just before `start`."""
    depth = 1
    for parenthesis in PARENTHESIS.finditer(text, start):
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return parenthesis.start()
    return len(text)


@dataclass(frozen=True)
class Kernel:
    """One Pallas kernel; calls with the same name and shapes are counted together."""

    name: str
    """The Python function that built it, or `tpu_custom_call` where that is unknown."""
    count: int
    """Calls in one run of the program, per chip."""
    flops: float | None
    """FLOPs of one call as the kernel's author states them (usually without regard to causal masks); None where not
    stated."""
    num_bytes: float
    """Bytes that one call moves as the kernel's author states them: it may read one layer of a stack; else those of its
    operands and results."""
    operand_shapes: tuple[str, ...] = ()
    """Arrays that one call reads, for example `bf16[1,32,2048,128]`."""


@dataclass(frozen=True)
class Transfer:
    """Collectives of one kind over groups of one size, per chip and run of the program."""

    kind: str
    """`all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all` or `collective-permute`, ..."""
    count: int
    num_bytes: float
    """Bytes over all calls: of the result for an all-gather, of the operand otherwise."""
    num_overlapped: int
    """Those of `count` that run beside computation: asynchronous, with compute between start and end."""
    group_size: int
    """Chips that exchange with each other."""
    overlapped_bytes: float = 0
    """The part of `num_bytes` that the overlapped ones move."""

    def plus(self, other: "Transfer", *, times: int = 1) -> "Transfer":
        """Return both together, the other one counted `times` times."""
        return replace(
            self,
            count=self.count + times * other.count,
            num_bytes=self.num_bytes + times * other.num_bytes,
            num_overlapped=self.num_overlapped + times * other.num_overlapped,
            overlapped_bytes=self.overlapped_bytes + times * other.overlapped_bytes,
        )
