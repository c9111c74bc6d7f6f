"""What a run sent to its client, compiled by libtpu with the run's options and flags, beside the plan's programs."""

import importlib.util
import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax._src.lib import xla_client

from tests.planning.programs import Program, hlo_text
from tests.rehearsal.machine import built
from tests.rehearsal.rehearse import Sent
from tpu_experiments.config.hardware import HwConfig

COUNTED = ("convolution", "dot", "custom-call", "while", "conditional", "all-reduce", "all-gather", "reduce-scatter")
COUNTED = (*COUNTED, "all-to-all", "collective-permute", "all-reduce-start", "all-gather-start", "scatter", "gather")
"""Operations of an optimised program that are compared: products, kernels, loops and sums over chips."""
LINE = re.compile(r"^\s+(?:ROOT )?%?\S+ = (\(.*?\)|\S+) ([a-z][\w\-]*)\(", re.MULTILINE)
LAYOUT = re.compile(r"\{[^}]*\}|/\*.*?\*/")


@dataclass(frozen=True)
class Compiled:
    """A program by libtpu."""

    memory: dict[str, int]
    """Bytes of a chip: arguments, outputs, aliased, temporaries, code."""
    operations: Counter[str]
    """Those of COUNTED with the shapes of their results."""


@dataclass(frozen=True)
class Pair:
    """A program of the plan and the same program of the run."""

    name: str
    planned: Compiled
    sent: Compiled
    has_same_outputs: bool
    """Whether every output of the plan's lowered program is computed by the run's in the same way.

    The run's has further ones: results under their shapes before a view.
    """

    def differences(self) -> list[str]:
        """Return what differs; empty where the two are the same program."""
        found = [] if self.has_same_outputs else ["outputs are computed otherwise"]
        for operation in self.planned.operations | self.sent.operations:
            planned, sent = self.planned.operations[operation], self.sent.operations[operation]
            if planned != sent:
                found.append(f"{operation}: {planned} planned, {sent} sent")
        for kind in ("arguments", "aliased"):
            if self.planned.memory[kind] != self.sent.memory[kind]:
                found.append(f"{kind}: {self.planned.memory[kind]:,} bytes planned, {self.sent.memory[kind]:,} sent")
        return found

    @property
    def total_difference(self) -> float:
        """Relative difference of the bytes that the program holds at once.

        Arguments have another order in the plan, which libtpu's schedule follows: of tiny models up to 11 %.
        """
        planned, sent = (_total(one.memory) for one in (self.planned, self.sent))
        return abs(sent - planned) / planned


def _total(memory: dict[str, int]) -> int:
    return memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"] + memory["code"]


def compiled(sent: Sent, *, hw: HwConfig) -> Compiled:
    """Compile one program by the real libtpu.

    Raises:
        RuntimeError: it refuses the program, with its message.
    """
    assert hw.topology is not None, f"hw={hw.name} has no topology"
    library = importlib.util.find_spec("libtpu")
    assert library is not None, "the tests' environment has libtpu"
    assert library.origin is not None
    result = sent.program.with_suffix(".tpu")
    command = [
        *(str(built("compiler.c")), str(Path(library.origin).with_name("libtpu.so"))),
        *(hw.topology, "1" if hw.num_devices == 1 else "0", str(sent.program), str(sent.options), str(result)),
    ]
    own = {"LIBTPU_INIT_ARGS": sent.flags, "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{sent.program.name}: {done.stderr.strip()[-2000:]}")
    return Compiled(json.loads(done.stdout.splitlines()[-1]), operations_of(_optimised(result)))


def _optimised(path: Path) -> str:
    """Return the text of a serialised HloProto, whose first field is the module."""
    content = path.read_bytes()
    size, shift, place = 0, 0, 1
    assert content[0] == 0x0A, "field 1, with a length"
    while True:
        byte = content[place]
        size, shift, place = size | (byte & 0x7F) << shift, shift + 7, place + 1
        if byte < 0x80:
            break
    module = xla_client._xla.HloModule.from_serialized_hlo_module_proto(content[place : place + size])
    return str(module.to_string())


def operations_of(text: str) -> Counter[str]:
    """Return the counted operations of an optimised program; those that follow the arguments' order without it."""
    found = ((name, LAYOUT.sub("", shape)) for shape, name in LINE.findall(text) if name in COUNTED)
    return Counter(name if name == "while" else f"{name} {_in_order(shape)}" for name, shape in found)


def _in_order(shape: str) -> str:
    """Return the shapes of a tuple, such as that of sums over chips that are combined, in alphabetical order."""
    return ", ".join(sorted(shape.strip("()").split(", ")))


def planned_in(folder: Path) -> Iterator[tuple[dict[str, Any], Path]]:
    """Yield the request and the folder of each program that a plan compiled below its `output_dir`."""
    for request in sorted(folder.glob("plans/compiled/*/request.json")):
        yield json.loads(request.read_text()), request.parent


def pairs(sent: list[Sent], *, plan: Path, hw: HwConfig) -> list[Pair]:
    """Return each planned program beside the program of the run that computes the same outputs, compiled.

    Raises:
        LookupError: a planned program has none that shares an output with it.
    """
    lowered = [Program(hlo_text(one.program.read_bytes())).signature()["outputs"] for one in sent]
    found = []
    for _, folder in planned_in(plan):
        own = Counter(Program(hlo_text((folder / "program.hlo").read_bytes())).signature()["outputs"])
        shared = [sum((own & Counter(other)).values()) for other in lowered]
        best = max(range(len(sent)), key=lambda index: shared[index])
        if not shared[best]:
            raise LookupError(f"no program of the run computes what {folder} does")
        answer = json.loads((folder / "answer.json").read_text())
        planned = Compiled(answer["memory"], operations_of((folder / "optimized.hlo").read_text()))
        same = not (own - Counter(lowered[best]))
        found.append(Pair(folder.name, planned, compiled(sent[best], hw=hw), same))
    return found
