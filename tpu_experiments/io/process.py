"""When a process began, by the kernel's own count: it does not move when the clock is set (proc(5))."""

import os
import time
from pathlib import Path

ZOMBIE = "Z"


def started_ticks(pid: int) -> int:
    """Clock ticks from the boot to the start of a process.

    Raises:
        ProcessLookupError: there is none of that number, or it has ended and waits for its parent.
    """
    try:
        # The second field is the program's name in parentheses, which may hold blanks and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError(pid) from error
    if fields[0] == ZOMBIE:
        raise ProcessLookupError(pid)
    return int(fields[19])


def boot_seconds() -> float:
    """Seconds since the boot; all processes of a machine agree."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def started_seconds() -> float:
    """Seconds from the boot to the start of this process."""
    return started_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
