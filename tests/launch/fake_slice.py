"""A slice in the fake cloud whose workers do not end alike."""

from launch.tpu_vm.world import Completed
from tests.launch.fake_cloud import NEVER, FakeCloud, Machine, SimulatedClock

OTHERS_SECONDS = 5.0
"""After the first failure the others see that it is gone, and end with 1."""


class FakeSlice(FakeCloud):
    """`ends` has for each start when which worker ends, in seconds after it, and how.

    A worker ends with an exit code, is `lost`, or is `deaf`: it ends with 137 when it is stopped. Once one has ended
    with another code than 0, those that are not named end with 1.
    """

    def __init__(self, *, num_workers: int, work: float = 3600.0) -> None:
        super().__init__(SimulatedClock(), work=work)
        self.num_workers = num_workers
        self.ends: list[dict[int, tuple[float, str]]] = []
        self.stopped_after: list[float] = []
        """Seconds after the start at which the workers were told to stop."""
        self._present: dict[int, tuple[float, str]] = {}

    def start(self, machine: Machine, run_id: str, run_words: str) -> None:
        if machine.run_id != run_id:
            self._present = self.ends.pop(0) if self.ends else {}
        super().start(machine, run_id, run_words)

    def ssh(self, machine: Machine, words: list[str], stdin: str) -> Completed:
        if any("worker.sh stop" in word for word in words):
            self.stopped_after.append(self.clock.now() - machine.started_at)
        return super().ssh(machine, words, stdin)

    def progress(self, machine: Machine, *, until: float = NEVER) -> None:
        if self.first_failure(machine) is None:
            super().progress(machine, until=until)

    def first_failure(self, machine: Machine) -> float | None:
        since = self.clock.now() - machine.started_at
        failures = (at for at, how in self._present.values() if how not in ("0", "deaf") and at <= since)
        return min(failures, default=None)

    def look(self, machine: Machine, count: int) -> Completed:
        first = self.first_failure(machine)
        if first is None:
            return super().look(machine, count)
        lines = (self.line(machine, worker, first + OTHERS_SECONDS) for worker in range(count))
        return Completed(0, "".join(lines))

    def line(self, machine: Machine, worker: int, others_at: float) -> str:
        at, how = self._present.get(worker, (others_at, "1"))
        has_ended = self.clock.now() - machine.started_at >= at and (how != "deaf" or machine.stop_asked)
        if not has_ended:
            state = "run=running code=-"
        elif how == "lost":
            state = "run=lost code=-"
        else:
            state = f"run=exited code={137 if how == 'deaf' else how}"
        return f"tpuexp worker={worker} {state} stop=no preempted=FALSE bytes=0 at={at}\n"
