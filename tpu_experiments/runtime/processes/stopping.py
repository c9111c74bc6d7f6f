"""Requests to stop: seen by all processes of a run at one step, and passed on to commands that run as children.

A process that starts others takes SIGTERM and Ctrl-C for them: torch_xla's children run in a thread, where Python
runs no handler. It blocks both signals in its main thread before it starts them, which they inherit, so that a signal
to the whole group kills nobody; a thread of each process waits for signals instead. What they share is a page of
memory: the request, and how often each process has asked whether to stop."""

import fcntl
import mmap
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType

from tpu_experiments.runtime.processes.tether import tied_command

SIGNALS = (signal.SIGTERM, signal.SIGINT)
MAX_PROCESSES = 256
REQUESTED, STOP_AT, CALLS = 0, 1, 2
"""Indices of the page's 8-byte fields; from CALLS on there is one for each process."""
STUCK_SECONDS = 300.0  # the longest time that a TPU maintenance event leaves a process to stop
WATCH_SECONDS = 0.5
INTERRUPTED_EXIT_CODE = 130  # a shell's exit code for a program that Ctrl-C ended
TERMINATED_EXIT_CODE = 143


@dataclass(frozen=True)
class Ticket:
    """Where a child finds the page: a process id and a file descriptor that is open there."""

    parent: int
    file: int


class SharedRequest:
    """The shared page; every process that maps it may ask all to stop."""

    def __init__(self, file: int) -> None:
        self._file = file
        os.ftruncate(file, 8 * (CALLS + MAX_PROCESSES))
        self._page = memoryview(mmap.mmap(file, 8 * (CALLS + MAX_PROCESSES))).cast("q")

    @classmethod
    def of(cls, ticket: Ticket) -> "SharedRequest":
        """Map the page of the process that started this one."""
        return cls(os.open(f"/proc/{ticket.parent}/fd/{ticket.file}", os.O_RDWR))

    @property
    def requested(self) -> bool:
        """Whether any process has asked to stop."""
        return bool(self._page[REQUESTED])

    @property
    def requested_at(self) -> float | None:
        """Time of the first request, in seconds of the machine-wide monotonic clock; None without one."""
        return self._page[REQUESTED] / 1e9 if self.requested else None

    def request(self) -> None:
        """Ask all processes to stop; a second call changes nothing."""
        self._page[REQUESTED] = self._page[REQUESTED] or time.monotonic_ns()

    def wait(self) -> None:
        """Return after any process has asked to stop."""
        while not self.requested:
            time.sleep(WATCH_SECONDS)

    def agreed(self, rank: int) -> bool:
        """Return whether to stop here; every process of the run must call it at the same points of its work.

        It is True at the same point on all: the first that no process had passed when the request was seen.
        """
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            self._page[CALLS + rank] += 1
            mine = self._page[CALLS + rank]
            if self._page[REQUESTED] and not self._page[STOP_AT]:
                others = max(self._page[CALLS + r] for r in range(MAX_PROCESSES) if r != rank)
                self._page[STOP_AT] = mine if others < mine else others + 1
            return mine == self._page[STOP_AT]
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


_joined: tuple[SharedRequest, int] | None = None
_handed_out: SharedRequest | None = None


def joined() -> tuple[SharedRequest, int] | None:
    """Return the shared page and this process's rank; None where the run is one process."""
    return _joined


def children_requested_at() -> float | None:
    """Return the monotonic time of the stop request to this process's children; None without one."""
    return _handed_out.requested_at if _handed_out is not None else None


def join(ticket: Ticket, *, rank: int) -> None:
    """Join the stop request of the parent, which has started this process under `signals_for_children`."""
    global _joined
    request = SharedRequest.of(ticket)
    _joined = request, rank
    threading.Thread(target=_watch, args=(request, ticket.parent), name="signals", daemon=True).start()


def _watch(request: SharedRequest, parent: int) -> None:
    """Wait for signals in a child and pass them to the shared request.

    SIGTERM from the parent without a request means that another child has died: this one ends at once.
    """
    while True:
        info = signal.sigwaitinfo(SIGNALS)
        if info.si_signo == signal.SIGTERM and info.si_pid == parent and not request.requested:
            os._exit(TERMINATED_EXIT_CODE)
        request.request()
        stuck = threading.Timer(STUCK_SECONDS, os._exit, args=(TERMINATED_EXIT_CODE,))
        stuck.daemon = True
        stuck.start()


@contextmanager
def signals_for_children() -> Iterator[Ticket]:
    """Turn SIGTERM and the first Ctrl-C into a stop request to the children started inside.

    A second Ctrl-C ends everything at once. Only the main thread may call it, and the children pass the ticket to
    `join`.
    """
    global _handed_out
    file = os.memfd_create("tpu_experiments_stop")
    _handed_out = request = SharedRequest(file)
    resource_tracker.ensure_running()  # starting it unblocks both signals
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    former = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    wakeup = signal.set_wakeup_fd(writing)
    listener = threading.Thread(target=_listen, args=(reading, request), name="signals", daemon=True)
    listener.start()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield Ticket(os.getpid(), file)
    finally:
        signal.set_wakeup_fd(wakeup)
        os.close(writing)  # ends the listener
        listener.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in former.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(file)


def _listen(reading: int, request: SharedRequest) -> None:
    """Read signal numbers from the wake-up pipe and pass them to the shared request.

    They arrive there whichever thread the kernel delivered them to.
    """
    interrupted = False
    while numbers := os.read(reading, 64):
        for number in numbers:
            if number == signal.SIGINT and interrupted:
                os._exit(INTERRUPTED_EXIT_CODE)  # the children die with this process
            interrupted = interrupted or number == signal.SIGINT
            request.request()


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
                tied_command(command, cores=cores),
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
