"""Start time and peak memory of processes.

The start is by the kernel's own count, which does not move when the clock is set (proc(5)); the peak of resident
memory is that of a process and all its descendants together."""

import contextlib
import os
import threading
import time
from pathlib import Path

import psutil

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


GIB = 2**30
INTERVAL_SECONDS = 1.0  # reading the page tables takes some 20 ms a GiB


class PeakMemory:
    """Context that samples memory in use as proportional set size (PSS).

    A page that n processes share counts as 1/n for each.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak_memory", daemon=True)

    @property
    def gib(self) -> float:
        """Largest sum seen so far, in GiB."""
        return self.peak_bytes / GIB

    def __enter__(self) -> "PeakMemory":
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            self._sample()

    def _sample(self) -> None:
        me = psutil.Process()
        total = 0
        for process in [me, *me.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_full_info().pss
        self.peak_bytes = max(self.peak_bytes, total)
