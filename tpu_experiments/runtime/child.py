"""Child processes that receive their parent's stop signals and do not outlive it."""

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
    """Forwards SIGTERM and Ctrl-C to the running children; `asked` is True after the first."""

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
        """Start a child; from the first call on, SIGTERM and Ctrl-C do not end this process by themselves.

        Only the main thread may call it: the kernel kills a child when the thread that started it ends.

        Args:
            env: environment variables of the child besides those of this process.
            cores: CPU cores that the child is pinned to; None for all.
            output: a file that its stdout and stderr are appended to; None for this process's own streams.
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
        if self.asked:  # a signal arrived while it was being started
            child.terminate()
        return child

    def run(self, command: Sequence[str]) -> int:
        """Run a command as a child and return its exit code."""
        return self.start(command).wait()

    def ask(self) -> None:
        """Send SIGTERM to every running child, as SIGTERM to this process would."""
        self._pass_on(signal.SIGTERM, None)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        for child in self._children:
            child.send_signal(number)
