"""Rewrite a program of a TPU for a CPU: what only the TPU's compiler has is replaced. Runs as a command.

    python translation.py PROGRAM RESULT

`AllocateBuffer`, memory that nothing wrote, becomes zeros, and an array that is moved to the host or back a copy. A
computation with kernels of Mosaic becomes the same function of interpreted kernels, which the process that made it
wrote down (`record`, called by site/sitecustomize.py). Everything else stays as the program has it."""

import hashlib
import os
import re
import sys
from pathlib import Path

from jax._src.lib import xla_client

KERNEL, BUFFER = 'custom_call_target="tpu_custom_call"', 'custom_call_target="AllocateBuffer"'
PLACEMENT = re.compile(r'custom-call\((%[\w.\-]+)\), custom_call_target="annotate_device_placement"')
HEAD = re.compile(r"^(?:ENTRY )?%(\S+) \(", re.MULTILINE)
NAME = re.compile(r"%([\w.\-]+)")
ENTRY_OF_JAX = "main."
"""How the names of computations begin that jax lowered as a whole."""


def text_of(program: bytes) -> str:
    """Return the text of a serialised HloModuleProto."""
    module = xla_client._xla.HloModule.from_serialized_hlo_module_proto(program)
    options = xla_client._xla.HloPrintOptions()
    options.print_large_constants = True
    options.print_metadata = False
    # What torch_xla leaves unsaid of a custom call is printed, and not read again.
    return str(module.to_string(options)).replace(", api_version=API_VERSION_UNSPECIFIED", "")


def computations_of(text: str) -> dict[str, str]:
    """Return the computations of a program's text by name, in their order; those behind the last brace are left out."""
    starts = [*HEAD.finditer(text)]
    ends = [following.start() for following in starts[1:]] + [len(text)]
    return {head[1]: text[head.start() : end].rstrip() for head, end in zip(starts, ends, strict=True)}


def key_of(entry: str, computations: list[str]) -> str:
    """Return the name of a function of kernels: a hash of its interface and of what Mosaic is given, in order."""
    parts = re.findall(r"(?:: |-> )(.*?)(?=, [\w.\-]+: |\) -> | \{$)", entry.partition("\n")[0])
    parts += [
        line.partition("backend_config=")[2] for one in computations for line in one.split("\n") if KERNEL in line
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def reached(name: str, computations: dict[str, str]) -> list[str]:
    """Return a computation and those that it calls, in the order of the text, in which every name is unique."""
    found, waiting = set(), [name]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += {*NAME.findall(computations[one])} & computations.keys()
    return [one for one in computations if one in found]


def record(tpu: bytes, interpreted: bytes, folder: Path) -> None:
    """Write the interpreted form of a lowered function of kernels, to be found by those kernels."""
    own = [*computations_of(text_of(tpu)).values()]
    entry = next(one for one in own if one.startswith("ENTRY"))
    path = folder / f"{key_of(entry, own)}.kernel.txt"
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(text_of(interpreted))
    new.rename(path)


def translated(text: str, folder: Path) -> str:
    """Return the text of a program that a CPU runs."""
    head = text[: HEAD.search(text).start()]  # type: ignore[union-attr]
    computations = computations_of(text)
    for name in [name for name in computations if name.startswith(ENTRY_OF_JAX)]:
        own = reached(name, computations)
        if any(KERNEL in computations[one] for one in own):
            key = key_of(computations[name], [computations[one] for one in own])
            computations[name] = _interpreted(name, (folder / f"{key}.kernel.txt").read_text())
    for name, body in computations.items():
        if BUFFER in body:
            computations[name] = "\n".join(_zeros(line) if BUFFER in line else line for line in body.splitlines())
    computations = computations_of("\n\n".join(computations.values()))  # those of interpreted kernels among them
    computations = {name: _without_placements(body) for name, body in computations.items()}
    entry = next(name for name, body in computations.items() if body.startswith("ENTRY"))
    return head + "\n\n".join(computations[name] for name in reached(entry, computations)) + "\n"


def _interpreted(name: str, text: str) -> str:
    """Return the computations of a function's text, its entry under another name, the others beside that."""
    own = computations_of(text)
    for one in own:
        own[one] = NAME.sub(lambda found: f"%{name}.i.{found[1]}", own[one])
    entry = next(one for one, body in own.items() if body.startswith("ENTRY"))
    own[entry] = own[entry].removeprefix("ENTRY ").replace(f"%{name}.i.{entry} (", f"%{name} (", 1)
    return "\n\n".join(own.values())


def _zeros(line: str) -> str:
    """Return the lines of an array of zeros in the place of one of memory that nothing wrote."""
    found = re.match(r"\s*(ROOT )?(%\S+) = (\w+)(\[[^ ]*) custom-call\(\)", line)
    assert found, line
    root, name, dtype, shape = found.groups()
    sharding = re.search(r", sharding=\{.*?\}(?=,|$)", line)
    made = f"  {root or ''}{name} = {dtype}{shape} broadcast({name}.zero), dimensions={{}}"
    zero = f"  {name}.zero = {dtype}[] constant({'false' if dtype == 'pred' else 0})"
    return f"{zero}\n{made}{sharding[0] if sharding else ''}"


def _without_placements(body: str) -> str:
    """Return a computation whose arrays are copied instead of moved between the memories of host and device."""
    lines = body.splitlines()
    for number, line in enumerate(lines):
        if PLACEMENT.search(line):
            lines[number] = PLACEMENT.sub(r"copy(\1)", line).partition("), ")[0].rstrip(")") + ")"
    return "\n".join(lines)


def main(program: str, result: str) -> None:
    """Translate one file."""
    text = translated(text_of(Path(program).read_bytes()), Path(program).parent)
    module = xla_client._xla.hlo_module_from_text(text)
    Path(result).write_bytes(module.as_serialized_hlo_module_proto())


if __name__ == "__main__":
    main(*sys.argv[1:])
