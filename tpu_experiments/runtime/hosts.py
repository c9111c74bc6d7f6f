"""The hosts of one run: one process each (`hw.parallel=spmd`, `hw.num_hosts`), and what they tell each other.

A program of `spmd` is one program over the chips of all hosts, so every process makes the same calls in the same order.
What a host decides by itself (a request to stop, a clock, an error of its disk) is told to the others over gloo; they
meet on port 29500 of the first host before a device is touched.
"""

import atexit
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.runtime.host_watch import LOST_SECONDS, HostWatch

PORT = 29500  # torch.distributed's own default
MEET_SECONDS = 900.0
"""The longest that the first host waits for the last: VMs of a slice are set up side by side, not at the same speed."""
ANSWER_SECONDS = 6 * 3600.0
"""The longest that a host waits for one that is alive: the first may prepare data, or write to a bucket that is out."""
Result = TypeVar("Result")


class HostLost(Exception):
    """Another host of the run has ended or failed; the text is a sentence."""


@dataclass(frozen=True)
class Place:
    """Which of the run's hosts this is, and where they meet."""

    rank: int
    address: str
    port: int = PORT


class Hosts:
    """The hosts of a run as one of them sees them; every method must be called by all, in the same order."""

    def __init__(self, rank: int = 0, size: int = 1, *, watch: HostWatch | None = None) -> None:
        self.rank, self.size, self._watch = rank, size, watch

    def any(self, flag: bool) -> bool:
        """True on every host when it is True on one."""
        if self.size == 1:
            return flag
        votes = torch.tensor([int(flag)], dtype=torch.int32)
        self._told(lambda: dist.all_reduce(votes, op=dist.ReduceOp.MAX))
        return bool(votes.item())

    def gather(self, value: Any) -> list[Any]:
        """What each host has given, by its rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        self._told(lambda: dist.all_gather_object(found, value))
        return found

    def barrier(self) -> None:
        """Wait for all."""
        self.any(False)

    def together(self, action: Callable[[], Result]) -> Result:
        """Do it on every host; where it fails on one, no host goes on.

        Raises:
            ConfigError: of this host or of another.
            HostLost: it failed otherwise on another host.
        """
        try:
            result, error = action(), None
        except Exception as caught:
            result, error = None, caught
        told = self.gather(None if error is None else (isinstance(error, ConfigError), f"{error}"))
        if error is not None:
            raise error
        for rank, complaint in enumerate(told):
            if complaint is not None:
                is_of_user, text = complaint
                raise ConfigError(text) if is_of_user else HostLost(f"host {rank} of {self.size} failed: {text}")
        return result  # type: ignore[return-value]

    def on_first(self, action: Callable[[], object]) -> None:
        """Do it on the first host while the others wait; where it fails, no host goes on. Raises as `together`."""
        self.together(action if self.rank == 0 else lambda: None)

    def part(self) -> None:
        """Say that the run ends on every host alike, so that none takes another's end for a loss."""
        if self._watch is not None:
            self._watch.part()

    def _told(self, exchange: Callable[[], object]) -> None:
        try:
            exchange()
        except RuntimeError as error:
            if self._watch is not None:
                self._watch.stand_down()
            raise HostLost(
                f"host {self.rank} of {self.size} lost another ({_first_line(error)}); that host's log says why."
            ) from error


_joined = Hosts()


def joined() -> Hosts:
    """The hosts of this process's run."""
    return _joined


def meet(hw: HwConfig, *, seconds: float = MEET_SECONDS, lost_seconds: float = LOST_SECONDS) -> Hosts:
    """Wait so long for the other hosts of the run; no device is touched. One that is gone later ends this process.

    Raises:
        ConfigError: this machine does not know its place.
        HostLost: the others do not come, which a slice that waits for capacity may yet do.
    """
    global _joined
    if hw.num_hosts == 1 or _joined.size > 1:
        return _joined
    place = _place(hw)
    try:
        watch = _connected(place, hw.num_hosts, seconds=seconds, lost_seconds=lost_seconds)
    except (RuntimeError, OSError) as error:
        raise HostLost(
            f"hw.num_hosts={hw.num_hosts}; host {place.rank} did not meet the others at {place.address}:{place.port} "
            f"({_first_line(error)}); they start within {seconds / 60:.0f} min of each other and reach that port and "
            "the next of the first (the default network of a project lets them)."
        ) from error
    atexit.register(dist.destroy_process_group)  # else gloo's threads may abort the process at its end
    _joined = Hosts(place.rank, hw.num_hosts, watch=watch)
    return _joined


def _connected(place: Place, num_hosts: int, *, seconds: float, lost_seconds: float) -> HostWatch:
    """Gloo's connections, and those that tell of a host that is gone: on the next port, or any where that is taken."""
    is_first, wait = place.rank == 0, timedelta(seconds=seconds)
    store = dist.TCPStore(place.address, place.port, num_hosts, is_master=is_first, timeout=wait)
    answer = timedelta(seconds=ANSWER_SECONDS)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=num_hosts, timeout=answer)
    watch = HostWatch(place.rank, num_hosts, lost_seconds=lost_seconds)
    if is_first:
        store.set("watch", str(watch.listen(place.port + 1)))
        watch.accept(seconds=seconds)
    else:
        watch.connect(place.address, int(store.get("watch")), seconds=seconds)
    return watch


def _place(hw: HwConfig) -> Place:
    """By torchrun's variables (RANK, MASTER_ADDR, MASTER_PORT) where they are set; else as the TPU's VM knows it.

    Raises:
        ConfigError: neither says it, or says another number of hosts.
    """
    try:
        size, place = _of_torchrun(hw) if "MASTER_ADDR" in os.environ else _of_slice(hw)
    except (OSError, KeyError, ValueError) as error:  # requests' errors are OSErrors
        raise ConfigError(
            f"hw.num_hosts={hw.num_hosts} with hw.device={hw.device}; nobody says which host this is "
            f"({_first_line(error)}); set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does."
        ) from error
    if size != hw.num_hosts or not 0 <= place.rank < size:
        raise ConfigError(
            f"hw.num_hosts={hw.num_hosts}; this is host {place.rank} of {size}; choose the hw= of this slice, or start "
            "the command on all of its hosts."
        )
    return place


def _of_torchrun(hw: HwConfig) -> tuple[int, Place]:
    given = os.environ
    size, rank, port = (
        int(given.get("WORLD_SIZE", hw.num_hosts)),
        int(given["RANK"]),
        int(given.get("MASTER_PORT", PORT)),
    )
    return size, Place(rank, given["MASTER_ADDR"], port)


def _of_slice(hw: HwConfig) -> tuple[int, Place]:
    if hw.device != "tpu":
        raise ValueError("it is no worker of a slice")
    from tpu_experiments.runtime.xla_hosts import workers

    rank, addresses = workers()
    return len(addresses), Place(rank, addresses[0])


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
