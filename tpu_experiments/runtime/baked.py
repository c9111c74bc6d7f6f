"""Comparison of two traces' HLO, instruction by instruction, to find the Python value that changed.

A number that Python computes is baked into a program where it sets a shape or an attribute (a slice, a shift, a
power), and as a constant where it is 0 or 1; torch_xla passes other factors and summands to the program as inputs.
"""

import re
from collections import Counter
from dataclasses import dataclass

INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (.*)$")
KIND = re.compile(r"^(\S+) ([\w-]+)\(")
METADATA = re.compile(r", metadata=\{[^}]*\}")
PLACE = re.compile(r'source_file="([^"]+)" source_line=(\d+)')
OPERAND = re.compile(r"%[\w.-]+")
FOLLOWERS = {"tuple", "get-tuple-element", "while", "call", "conditional"}
"""Opcodes that are left out: their types contain those of their operands, so they change with any instruction."""
MAX_SHOWN = 3


@dataclass(frozen=True)
class Instruction:
    """One HLO instruction without names, so that it can be compared between programs."""

    type: str
    opcode: str
    text: str


def changed_values(before: str, now: str) -> str:
    """Describe up to three differences between two HLO texts; empty where there are none.

    For example `f32[] constant(2.5) became f32[] constant(3.5) (lab.py:14)`. The source line is from the metadata of
    `now`, which torch_xla writes in its IR debug mode. A line in an installed package is left out: it would identify
    the operation and not the user's code.
    """
    old, new = instructions(before), instructions(now)
    gone, come = Counter(i for i, _ in old), Counter(i for i, _ in new)
    places = {instruction: place for instruction, place in new if place}
    added = sorted((come - gone).elements(), key=_rank)
    removed = sorted((gone - come).elements(), key=_rank)
    shown = []
    for instruction in added:
        place = f" ({places[instruction]})" if instruction in places else ""
        partner = next((i for i in removed if (i.type, i.opcode) == (instruction.type, instruction.opcode)), None)
        if partner is not None:
            removed.remove(partner)
        said = f"{partner.text} became {instruction.text}" if partner else f"{instruction.text} is new"
        shown.append((_rank(instruction)[0], not place, f"{said}{place}"))
    shown += [(_rank(instruction)[0], True, f"{instruction.text} is gone") for instruction in removed]
    return "; ".join([said for *_, said in sorted(dict.fromkeys(shown))][:MAX_SHOWN])


def instructions(hlo: str) -> list[tuple[Instruction, str]]:
    """Return every instruction outside FOLLOWERS, each with its Python source line or an empty string."""
    found = []
    for line in hlo.splitlines():
        match = INSTRUCTION.match(line)
        kind = KIND.match(match[1]) if match else None
        if match is None or kind is None or kind[2] in FOLLOWERS:
            continue
        text = " ".join(OPERAND.sub("", METADATA.sub("", match[1])).replace(" ,", ",").replace(" )", ")").split())
        if kind[2] == "parameter":
            text = f"an input {kind[1]}"
        found.append((Instruction(kind[1], kind[2], text), _place(match[1])))
    return found


def _place(line: str) -> str:
    """Return `folder/file.py:14`, or an empty string for a line in an installed package."""
    found = PLACE.search(line)
    if found is None or "site-packages" in found[1]:
        return ""
    return f"{'/'.join(found[1].split('/')[-2:])}:{found[2]}"


def _rank(instruction: Instruction) -> tuple[int, str]:
    """Return a sort key by how much a change explains: constants, attributes, others, then inputs."""
    has_attributes = "={" in instruction.text or "=[" in instruction.text
    order = 0 if instruction.opcode == "constant" else 1 if has_attributes else 2
    order = 3 if instruction.opcode == "parameter" else order
    return order, instruction.text
