"""Ties a process to its parent: the kernel kills it when the parent ends.

Run as a program, it ties itself to PARENT, pins itself to CORES and replaces itself by COMMAND:

    python -I -S tether.py PARENT CORES COMMAND...

Python code between fork and exec (Popen's `preexec_fn`) may deadlock in a process that has threads, and JAX, which
libtpu's users import, warns at each such fork.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence, Set

PR_SET_PDEATHSIG = 1  # linux/prctl.h
NOT_STARTED = 127  # a shell's exit code for a command that does not exist


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; end at once if it already has."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def tied_command(command: Sequence[str], *, cores: Set[int] | None = None) -> list[str]:
    """Return the command, wrapped so that as a child of this process it dies with its starting thread.

    Args:
        cores: CPU cores that it is pinned to; None for all.
    """
    allowed = ",".join(map(str, sorted(cores or ())))
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), allowed, *command]


def become(parent: int, cores: str, command: list[str]) -> None:
    """Tie this process to its parent and replace its program by the command; the pid stays."""
    die_with(parent)
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(NOT_STARTED)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
