"""Commands as child processes that are passed requests to stop and do not outlive the process that started them."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from tpu_experiments.runtime.stopping import SIGNALS
from tpu_experiments.runtime.tether import tied


class Relay:
    """Passes SIGTERM and Ctrl-C on to the children that run, and remembers that there was one."""

    def __init__(self) -> None:
        self.asked = False
        self._children: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cores: Set[int] | None = None,
        output: Path | None = None,
    ) -> "subprocess.Popen[bytes]":
        """A child; from the first call on this process does not end by these signals itself.

        Only the main thread may call it: the kernel kills a child when the thread that started it ends.

        Args:
            env: the child's variables beside those of this process.
            cores: the only CPU cores it may use; None for all.
            output: a file that its output is added to; None for this process's own streams.
        """
        for number in SIGNALS:
            signal.signal(number, self._pass_on)
        with ExitStack() as stack:
            stream = None if output is None else stack.enter_context(output.open("ab"))
            child = subprocess.Popen(
                tied(command, cores=cores),
                env={**os.environ, **(env or {})},
                stdout=stream,
                stderr=stream,
                # A terminal's Ctrl-C would reach a child of the same group twice, and the second ends it at once.
                process_group=0,
            )
        self._children = [*(each for each in self._children if each.poll() is None), child]
        if self.asked:  # while it was started
            child.terminate()
        return child

    def run(self, command: Sequence[str]) -> int:
        """The child's exit code."""
        return self.start(command).wait()

    def ask(self) -> None:
        """Ask every child that runs to stop, as a signal to this process does."""
        self._pass_on(signal.SIGTERM, None)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        for child in self._children:
            child.send_signal(number)
