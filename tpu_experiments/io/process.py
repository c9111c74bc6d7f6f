"""Start times of processes in time since the boot, which setting the clock does not change (proc(5))."""

import os
import time
from pathlib import Path

ZOMBIE = "Z"


def started_ticks(pid: int) -> int:
    """Return the clock ticks from the boot to the start of a process.

    Raises:
        ProcessLookupError: there is no process of this id, or it is a zombie.
    """
    try:
        # The second field is the program's name in parentheses, which may itself contain blanks and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError(pid) from error
    if fields[0] == ZOMBIE:
        raise ProcessLookupError(pid)
    return int(fields[19])


def boot_seconds() -> float:
    """Return the seconds since the boot, including suspended time; the same in all processes of a machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def started_seconds() -> float:
    """Return the seconds from the boot to the start of this process."""
    return started_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
