"""Commands of the product on a pretended TPU VM, and what they sent to their client."""

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.config.composing import composed_as_typed
from tests.rehearsal.machine import REPOSITORY, Machine
from tpu_experiments.config.hardware import HwConfig

SECONDS = 900
"""A rehearsal that hangs ends after this."""


@dataclass(frozen=True)
class Sent:
    """A program that a process compiled, as its client got it."""

    process: int
    program: Path
    options: Path
    flags: str
    """libtpu's, as they were when the client was made."""

    @property
    def has_tpu_calls(self) -> bool:
        """Whether only the TPU's compiler knows all of it: kernels, or memory that nothing writes."""
        return self.program.with_suffix(".pb.cpu").exists()


@dataclass(frozen=True)
class Rehearsal:
    """A command that has ended."""

    code: int
    output: str
    folder: Path
    programs: list[Sent] = field(default_factory=list)
    counts: dict[int, dict[str, int]] = field(default_factory=dict)
    """Calls of the client by process."""

    @property
    def executed(self) -> int:
        """Programs that were run, by all processes."""
        return sum(one["executed"] for one in self.counts.values())

    @property
    def error(self) -> str:
        """The last line of the output that reports an error; empty without one."""
        return next((line for line in reversed(self.output.splitlines()) if line.startswith("error: ")), "")


def hardware(words: Sequence[str]) -> HwConfig:
    """Return the hardware config of a command's words."""
    return composed_as_typed(*(word for word in words if word.startswith(("hw=", "hw.")))).hw


def rehearse(
    words: Sequence[str],
    *,
    folder: Path,
    machine: Machine | None = None,
    variables: Mapping[str, str] | None = None,
    kill_when: Callable[[], bool] | None = None,
    is_shown: bool = False,
) -> Rehearsal:
    """Run `python run.py WORDS` as its hardware's machine would, with what it sends written to `folder`.

    Args:
        machine: another machine than that of `hw=`.
        variables: environment variables beside the machine's.
        kill_when: asked every 0.1 s; once true, the command and its children are killed with SIGKILL.
        is_shown: whether the output goes to the terminal instead of into the result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = machine or Machine.of(hardware(words))
    found = replace(found, variables={**found.variables, **(variables or {})})
    process = subprocess.Popen(
        found.command([sys.executable, "run.py", *words]),
        cwd=REPOSITORY,
        env=found.environment(folder),
        stdout=None if is_shown else subprocess.PIPE,
        stderr=None if is_shown else subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    output = _output_of(process, kill_when)
    return Rehearsal(process.returncode, output, folder, programs_in(folder), counts_in(folder))


def _output_of(process: "subprocess.Popen[str]", kill_when: Callable[[], bool] | None) -> str:
    waited = 0.0
    while True:
        try:
            output, _ = process.communicate(timeout=0.1 if kill_when is not None else SECONDS)
            return output or ""
        except subprocess.TimeoutExpired:
            waited += 0.1 if kill_when is not None else SECONDS
        if waited >= SECONDS or (kill_when is not None and kill_when()):
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return output or ""


def programs_in(folder: Path) -> list[Sent]:
    """Return the programs that were sent, by process and in their order."""
    found = []
    for program in sorted(folder.glob("*.hlo.pb")):
        name = program.name.removesuffix(".hlo.pb")
        process = name.partition("_")[0]
        flags = (folder / f"{process}.flags").read_text()
        found.append(Sent(int(process), program, folder / f"{name}.options.pb", flags))
    return found


def counts_in(folder: Path) -> dict[int, dict[str, int]]:
    """Return how often each process called its client."""
    names = ("compiled", "executed", "memory_statistics", "read_back")
    found = {}
    for path in folder.glob("*.counts"):
        found[int(path.stem)] = dict(zip(names, struct.unpack("4q", path.read_bytes()), strict=True))
    return found
