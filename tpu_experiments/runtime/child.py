"""A command as a child process that is passed requests to stop and does not outlive the process that started it."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Sequence
from types import FrameType

from tpu_experiments.runtime.stopping import SIGNALS

PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Relay:
    """Passes SIGTERM and Ctrl-C on to the child that runs, and remembers that there was one."""

    def __init__(self) -> None:
        self.asked = False
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, command: Sequence[str]) -> int:
        """The child's exit code; from the first call on this process does not end by these signals itself.

        Only the main thread may call it.
        """
        for number in SIGNALS:
            signal.signal(number, self._pass_on)
        parent = os.getpid()
        # In a group of its own: a terminal's Ctrl-C would reach the child twice, and the second one ends it at once.
        with subprocess.Popen(command, preexec_fn=lambda: die_with(parent), process_group=0) as child:
            self._child = child
            if self.asked:  # while it was started
                child.terminate()
            code = child.wait()
            self._child = None
        return code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self._child is not None:
            self._child.send_signal(number)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; end at once if it already has."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
