"""A request to stop (SIGTERM of a spot reclaim, Ctrl-C) as a flag that the loop looks at between two steps."""

import signal
import threading
from types import FrameType

STOPPED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: the same command, given again, goes on


class StoppedByRequest(Exception):
    """The run was asked to stop, saved a checkpoint and did."""


class StopFlag:
    """Set by SIGTERM and by the first Ctrl-C; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> None:
        """Take over the signals; only the main thread may."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._request)
            signal.signal(signal.SIGINT, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
