"""Combine the workers' reports of one run: when it is over, and whose exit code counts."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

STOPPED_EXIT_CODE = 75
ENDING_SECONDS = 120.0
"""Time for the others to end after one has failed: their connection breaks at once, but compilation delays them."""
LINE = re.compile(
    r"^tpuexp worker=(\d+) run=(\w+) code=(\S+) stop=(\w+) preempted=(\w+) bytes=(\d+) at=(\S+)\s*$", re.MULTILINE
)
"""Status line printed by `launch/worker.sh look`."""


@dataclass(frozen=True)
class Worker:
    """Status of one VM."""

    number: int
    run: str
    """none, running, exited, or lost: the VM was restarted."""
    code: int | None
    is_stop_asked: bool
    is_preempted: bool
    num_bytes: int
    """Size of its log."""
    ended_at: float
    """Seconds since 1970 on its own clock; 0 while it runs."""


@dataclass(frozen=True)
class Verdict:
    """State of the run over all workers."""

    state: Literal["running", "exited", "lost"]
    """`exited` or `lost` as soon as one worker has failed or was restarted: the others cannot continue alone."""
    code: int | None
    is_over: bool
    """No worker is running any more."""
    why: str
    """Which of several workers decided the state."""


def workers_of(lines: Iterable["re.Match[str]"]) -> list[Worker]:
    """Parse workers from matches of LINE."""
    return [
        Worker(
            number=int(line[1]),
            run=line[2],
            code=None if line[3] == "-" else int(line[3]),
            is_stop_asked=line[4] == "asked",
            is_preempted=line[5] == "TRUE",
            num_bytes=int(line[6]),
            ended_at=0.0 if line[7] == "-" else float(line[7]),
        )
        for line in lines
    ]


def together(workers: Sequence[Worker]) -> Verdict:
    """Combine the workers' states; the first worker to exit with a non-zero code sets the exit code.

    The others ended because they lost it. After a request to stop, the first that did not save counts, if there is one.
    A restarted worker takes precedence over all: the run continues from its checkpoint.
    """
    is_over = not any(worker.run == "running" for worker in workers)
    lost = [worker.number for worker in workers if worker.run in ("lost", "none")]
    if lost:
        return Verdict("lost", None, is_over, _of(workers, lost[0], "was restarted"))
    failed = [worker for worker in workers if worker.code]
    if any(worker.is_stop_asked for worker in workers):
        failed = [worker for worker in failed if worker.code != STOPPED_EXIT_CODE] or failed
    if failed:
        first = min(failed, key=lambda worker: (worker.ended_at, worker.number))
        return Verdict("exited", first.code, is_over, _of(workers, first.number, f"ended first, with {first.code}"))
    return Verdict("exited" if is_over else "running", 0 if is_over else None, is_over, "")


def _of(workers: Sequence[Worker], number: int, what: str) -> str:
    return f"worker {number} of {len(workers)} {what} (logs/worker-{number}.log)" if len(workers) > 1 else ""
