"""Orders of a slice's devices, and the collectives that the compiler makes otherwise for another of them.

The TPU's compiler is told which chip each part of a program runs on, and chooses rings, combined transfers and fusions
by it: the program before its optimisation is the same, the one behind it need not be, and its sums are then rounded in
another order. LoRA with DPO has been seen to learn in some orders of one slice and not in others
(marin-community/marin issues 4755 and 4903). A plan cannot say which program is right; it says whether they differ.
"""

import math
import random
import re
from collections import Counter
from dataclasses import dataclass

from tpu_experiments.planning.hlo.collectives import KINDS
from tpu_experiments.planning.hlo.text import Instruction, Module, read_module

COMBINING = ("all-reduce", "reduce-scatter")
"""Collectives whose results depend on the order in which they combine values."""
CARRYING = frozenset(
    {"parameter", "tuple", "get-tuple-element", "while", "call", "conditional", "bitcast", "optimization-barrier"}
    | {"copy", "copy-start", "copy-done"}
)
"""Instructions that hand values on as they are; of loops and calls, those inside count. What a loop carries, and what
is copied ahead of its use, differs where a gather takes another way."""
SEED = 4903
GROUPS = r"(?:replica_groups|source_target_pairs)=(\{\{[\d,{}]*\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
"""Groups of chips, listed or as numbers in a grid: `{{0,1},{2,3}}`, `[2,4]<=[8]`, `[4,2]<=[2,4]T(1,0)`."""
IGNORED = r'metadata=\{[^}]*\}|channel_id=\d+|%[\w.\-]+|, async_collective_name="[^"]*"|"estimated_cycles":"\d+"'
"""Names, numbers and estimates, which differ without a difference of what is computed."""


@dataclass(frozen=True)
class Changed:
    """Collectives of one form, of which a program in another order has more or fewer."""

    kind: str
    shape: str
    """Type of the result, `(bf16[64,2048], f32[])` of combined ones."""
    groups: str
    """Chips that exchange with each other."""
    usual: int
    other: int
    """Numbers of such collectives in the usual order and in the other."""
    only_route: bool
    """Whether kind, shapes and groups are the same, and the way through the chips alone is another."""

    def __str__(self) -> str:
        what = "takes another way between the chips" if self.only_route else f"{self.usual} times, now {self.other}"
        return f"{self.kind} of {self.shape} over {self.groups}: {what}"


@dataclass(frozen=True)
class Order:
    """One order of the devices, and what its program does otherwise than that of the usual one."""

    devices: tuple[int, ...]
    changed: tuple[Changed, ...]
    other_instructions: int = 0
    """Instructions beside collectives, and beside those that carry values, of which there are more or fewer."""

    @property
    def differs(self) -> bool:
        """Whether the program is another one."""
        return bool(self.changed or self.other_instructions)

    @property
    def rounds_otherwise(self) -> bool:
        """Whether values are combined in another way; gathers and permutations alone move them as they are."""
        return bool(self.other_instructions) or any(each.kind in COMBINING for each in self.changed)


def orders_of(num_devices: int, *, count: int) -> list[tuple[int, ...]]:
    """Return `count` orders of the devices, or all there are: the usual one, structured ones, then drawn ones.

    Structured are the reverse, halves exchanged (as by hosts in another order) and neighbours exchanged.

    >>> orders_of(4, count=3)
    [(0, 1, 2, 3), (3, 2, 1, 0), (2, 3, 0, 1)]
    """
    usual = tuple(range(num_devices))
    half = num_devices // 2
    found = dict.fromkeys(
        (
            usual,
            usual[::-1],
            usual[half:] + usual[:half],
            tuple(number ^ 1 if number ^ 1 < num_devices else number for number in usual),
        )
    )
    generator = random.Random(SEED)
    wanted = min(count, math.factorial(num_devices))
    while len(found) < wanted:
        found[tuple(generator.sample(usual, num_devices))] = None
    return list(found)[:wanted]


def differences(usual: str, other: str) -> tuple[tuple[Changed, ...], int]:
    """Return the collectives that two compiled programs differ in, and the number of other instructions that do.

    Args:
        usual: text of a compiled HLO module.
        other: text of the module that was compiled for another order of the devices.
    """
    ours, theirs = (_collectives(read_module(text)) for text in (usual, other))
    changed = []
    for kind, shape, groups in dict.fromkeys((*ours.forms, *theirs.forms)):
        form = kind, shape, groups
        if ours.forms[form] != theirs.forms[form] or ours.routes[form] != theirs.routes[form]:
            same = ours.forms[form] == theirs.forms[form]
            changed.append(Changed(kind, shape, groups, ours.forms[form], theirs.forms[form], only_route=same))
    rest = (ours.rest - theirs.rest) + (theirs.rest - ours.rest)
    return tuple(changed), rest.total()


@dataclass
class _Collectives:
    """Collectives of a program by form, the ways that those of each form take, and all other instructions."""

    forms: Counter[tuple[str, str, str]]
    routes: dict[tuple[str, str, str], Counter[str]]
    rest: Counter[str]


def _collectives(module: Module) -> _Collectives:
    forms: Counter[tuple[str, str, str]] = Counter()
    routes: dict[tuple[str, str, str], Counter[str]] = {}
    rest: Counter[str] = Counter()
    for computation in module.computations.values():
        for instruction in computation.instructions:
            kind = instruction.opcode.removesuffix("-start")
            if kind in CARRYING or instruction.opcode in CARRYING:
                continue
            if kind not in KINDS:
                rest[f"{instruction.opcode} {_shapes(instruction)}"] += 1
                continue
            form = kind, _shapes(instruction), _groups(instruction)
            forms[form] += 1
            routes.setdefault(form, Counter())[
                _summed(instruction, module) + re.sub(IGNORED, "", instruction.attributes)
            ] += 1
    return _Collectives(forms, _WithEmpty(routes), rest)


class _WithEmpty(dict[tuple[str, str, str], Counter[str]]):
    def __missing__(self, key: tuple[str, str, str]) -> Counter[str]:
        return Counter()


def _summed(instruction: Instruction, module: Module) -> str:
    """Return the operations with which a collective combines values, such as `add`."""
    name = instruction.attribute(r"to_apply=%?([\w.\-]+)")
    return " ".join(sorted(module.computations[name].opcodes)) if name in module.computations else str(name)


def _shapes(instruction: Instruction) -> str:
    listed = ", ".join(map(str, instruction.shapes))
    return listed if len(instruction.shapes) == 1 else f"({listed})"


def _groups(instruction: Instruction) -> str:
    """Return the groups of chips as the program writes them."""
    found = re.search(GROUPS, instruction.attributes)
    return found[1] if found else "all chips"
