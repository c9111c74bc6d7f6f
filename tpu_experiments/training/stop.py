"""A request to stop (SIGTERM of a spot reclaim, Ctrl-C) as a flag that the loop looks at between two steps."""

import signal
import threading
from types import FrameType

from tpu_experiments.runtime import stopping

STOPPED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: the same command, given again, goes on


class StoppedByRequest(Exception):
    """The run was asked to stop, saved a checkpoint and did."""


class StopFlag:
    """Set by SIGTERM and by the first Ctrl-C; a second Ctrl-C interrupts at once.

    Where the run is several processes, the one that started them has taken over the signals (runtime/stopping.py).
    """

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> None:
        """Take over the signals; only the main thread may."""
        if stopping.joined() is None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._request)
            signal.signal(signal.SIGINT, self._request)

    def agreed(self) -> bool:
        """Whether to stop here; every process of the run calls it at the same points, and all stop at the same."""
        joined = stopping.joined()
        if joined is None:
            return self.requested
        request, rank = joined
        return request.agreed(rank)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
