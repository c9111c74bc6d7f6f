"""Trip counts of the loops of an HLO program, found by evaluating their counters.

A loop's condition reads a few integers that its body updates. They are followed from their start values, whatever form
the compiler chose: a plain counter, one unrolled by two (collective matrix products), one that starts at one, or a
64-bit counter split into two 32-bit halves (the s64 of torch on a TPU).
"""

import re
from collections.abc import Callable

from tpu_experiments.planning.hlo.text import Computation, Instruction, Module

# A loop of a training step runs as often as there are layers, blocks or chips; past this it is taken for endless.
MAX_TRIPS = 100_000

Argument = Callable[[int, int | None], int | None]
"""Value of parameter number k, or of element j of it when it is a tuple; None where it is no known integer."""

PASSES_ON = {"bitcast", "bitcast-convert", "broadcast", "convert", "copy", "copy-done", "copy-start", "reshape"}
PASSES_ON |= {"optimization-barrier"}
ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "maximum": max,
    "minimum": min,
    "divide": lambda a, b: int(abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1),  # HLO truncates
    "remainder": lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shift-left": lambda a, b: a << b,
    "shift-right-logical": lambda a, b: a >> b,
}
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
}


class Scope:
    """One computation with its arguments: integers are evaluated on request, anything else is None."""

    def __init__(self, module: Module, *, computation: Computation, argument: Argument) -> None:
        self.module = module
        self.computation = computation
        self.argument = argument
        self.known: dict[tuple[str, int | None], int | None] = {}

    def value(self, name: str, index: int | None = None) -> int | None:
        """Return the integer result of an instruction, or element `index` of its tuple; None where unknown."""
        key = (name, index)
        if key not in self.known:
            self.known[key] = None
            instruction = self.computation.by_name[name]
            value = self.find(instruction, index)
            self.known[key] = value if value is None or index is not None else wrapped(value, instruction)
        return self.known[key]

    def root(self, index: int | None = None) -> int | None:
        """Return the integer result of the computation; None where unknown."""
        return self.value(self.computation.root.name, index)

    def inside(self, instruction: Instruction, computation: Computation) -> "Scope":
        """Return the scope of a computation that the instruction calls with its operands."""
        operands = instruction.operands
        return Scope(self.module, computation=computation, argument=lambda k, j: self.value(operands[k], j))

    def loop_body(self, loop: Instruction) -> "Scope":
        """Return the scope of a loop's body in any of its trips.

        Known are only the values that every trip passes on unchanged.
        """
        body = self.module.computations[callee(loop, "body")]
        element = body.root.operands

        def argument(_: int, index: int | None) -> int | None:
            unchanged = index is not None and body.root.opcode == "tuple" and is_element(body, element[index], index)
            return self.value(loop.operands[0], index) if unchanged else None

        return Scope(self.module, computation=body, argument=argument)

    def find(self, instruction: Instruction, index: int | None) -> int | None:
        """Evaluate an instruction by its opcode, without the cache of `value`."""
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "parameter":
            return self.argument(int(instruction.operand_text), index)
        if opcode == "tuple":
            return None if index is None else self.value(operands[index])
        if opcode == "while":
            return self.loop_body(instruction).argument(0, index)
        if opcode in {"fusion", "call"}:
            return self.inside(instruction, self.module.callees(instruction)[0]).root(index)
        if opcode in PASSES_ON:
            return self.value(operands[0], index if opcode == "optimization-barrier" else None)
        if index is not None:
            return None
        if opcode == "get-tuple-element":
            element = instruction.attribute(r"index=(\d+)")
            return self.value(operands[0], int(element or 0))
        return self.computed(instruction)

    def computed(self, instruction: Instruction) -> int | None:
        """Evaluate constants and arithmetic; `and` and `or` need one side only where it decides."""
        opcode = instruction.opcode
        if opcode == "constant":
            return literal(instruction.operand_text)
        if opcode not in {"compare", "select", "clamp", "not", "negate", *ARITHMETIC}:
            return None
        values = [self.value(name) for name in instruction.operands]
        if opcode == "select":
            return None if values[0] is None else values[1 if values[0] else 2]
        if instruction.shapes[0].dtype == "pred" and (opcode, True) in {("or", 1 in values), ("and", 0 in values)}:
            return int(opcode == "or")
        given = [value for value in values if value is not None]
        if len(given) < len(values):
            return None
        if opcode == "compare":
            return int(COMPARISONS[instruction.attribute(r"direction=(\w+)") or "EQ"](*given))
        if opcode == "clamp":
            return max(given[0], min(given[1], given[2]))
        if len(given) == 1:
            return -given[0] if opcode == "negate" else ~given[0]
        return None if opcode in {"divide", "remainder"} and given[1] == 0 else ARITHMETIC[opcode](*given)


def trip_count(loop: Instruction, *, scope: Scope) -> int:
    """Return how often the body of a loop runs.

    The compiler's own figure is used where it is given: `known_trip_count` in the instruction's backend_config.

    Raises:
        ValueError: neither the compiler nor the counter determines it; the message names the loop.
    """
    known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"\}')
    if known:
        return int(known)
    module = scope.module
    condition, body = (module.computations[callee(loop, key)] for key in ("condition", "body"))

    def at_start(_: int, index: int | None) -> int | None:
        return scope.value(loop.operands[0], index)

    state: Argument = at_start
    for trips in range(MAX_TRIPS):
        goes_on = Scope(module, computation=condition, argument=state).root()
        if goes_on is None:
            raise ValueError(
                f"loop={loop.name}; its trip count cannot be determined: condition {condition.name} reads a value that "
                f"is unknown after {trips} trips; the estimate of this program would be wrong without it"
            )
        if not goes_on:
            return trips
        state = after_one_trip(module, body, state)
    raise ValueError(f"loop={loop.name}; it still runs after {MAX_TRIPS} trips; no training step holds such a loop")


def after_one_trip(module: Module, body: Computation, before: Argument) -> Argument:
    """Return the loop's state after one more run of the body."""
    scope = Scope(module, computation=body, argument=before)
    return lambda _, index: scope.root(index)


def callee(loop: Instruction, key: str) -> str:
    """Return the name of the loop's `condition` or `body`."""
    name = loop.attribute(rf"\b{key}=%?([\w.\-]+)")
    if name is None:
        raise ValueError(f"loop={loop.name}; it names no {key}; the printer of XLA may have changed")
    return name


def is_element(computation: Computation, name: str, index: int) -> bool:
    """Return whether an instruction is element `index` of the only parameter, perhaps copied."""
    instruction = computation.by_name[name]
    while instruction.opcode in {"copy", "copy-done", "copy-start"}:
        instruction = computation.by_name[instruction.operands[0]]
    is_read = instruction.opcode == "get-tuple-element" and instruction.attribute(r"index=(\d+)") == str(index)
    return is_read and computation.by_name[instruction.operands[0]].opcode == "parameter"


def literal(text: str) -> int | None:
    """Parse an integer or truth value as HLO writes constants; None for floats and arrays."""
    if text in {"true", "false"}:
        return int(text == "true")
    number = re.fullmatch(r"\{?(-?\d+)\}?", text)
    return int(number[1]) if number else None


def wrapped(value: int, instruction: Instruction) -> int | None:
    """Wrap the value around as its integer type does; None for floats and for several elements."""
    kind = re.fullmatch(r"([su])(\d+)|(pred)", instruction.shapes[0].dtype)
    if kind is None or instruction.shapes[0].num_elements != 1:
        return None
    if kind[3]:
        return value & 1
    size = 1 << int(kind[2])
    value %= size
    return value - size if kind[1] == "s" and value >= size // 2 else value
