"""The hosts of one run (`hw.num_hosts`), one process each, and collectives between them.

A program of `hw.parallel=spmd` is one program over the chips of all hosts, so every process makes the same calls in the
same order. What depends on one host (a stop request, a clock, a disk error) is exchanged over gloo. The hosts
rendezvous on port 29500 of the first before any device is initialised.
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
"""Rendezvous timeout: VMs of a slice are set up in parallel, not at the same speed."""
ANSWER_SECONDS = 6 * 3600.0
"""Timeout of a collective between live hosts: the first may prepare data, or retry a bucket that is out of reach."""
Result = TypeVar("Result")


class HostLost(Exception):
    """Another host of the run has ended or failed; the message is one sentence for the user."""


@dataclass(frozen=True)
class Place:
    """Rank of this host, and the rendezvous address of the run."""

    rank: int
    address: str
    port: int = PORT


class Hosts:
    """Collectives over the hosts of a run; every host must call each method, in the same order."""

    def __init__(self, rank: int = 0, size: int = 1, *, watch: HostWatch | None = None) -> None:
        self.rank, self.size, self._watch = rank, size, watch

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is True on any host."""
        if self.size == 1:
            return flag
        votes = torch.tensor([int(flag)], dtype=torch.int32)
        self._told(lambda: dist.all_reduce(votes, op=dist.ReduceOp.MAX))
        return bool(votes.item())

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all hosts, by rank; they must be picklable."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        self._told(lambda: dist.all_gather_object(found, value))
        return found

    def barrier(self) -> None:
        """Block until every host has called it."""
        self.any(False)

    def together(self, action: Callable[[], Result]) -> Result:
        """Run `action` on every host and return this host's result; a failure on one raises on all.

        Raises:
            ConfigError: raised by `action` on this host or on another.
            HostLost: `action` failed with another error on another host.
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
        """Run `action` on the first host while the others wait; a failure raises on all, as in `together`."""
        self.together(action if self.rank == 0 else lambda: None)

    def part(self) -> None:
        """Announce that the run ends on every host, so that none takes another's end for a loss."""
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
    """Return the hosts of this process's run; a single one before `meet`."""
    return _joined


def meet(hw: HwConfig, *, seconds: float = MEET_SECONDS, lost_seconds: float = LOST_SECONDS) -> Hosts:
    """Rendezvous with the other hosts of the run within `seconds`; initialises no device.

    From then on the loss of a host ends this process, `lost_seconds` after it is detected.

    Raises:
        ConfigError: this machine's rank cannot be determined, or the number of hosts differs from `hw.num_hosts`.
        HostLost: the others do not arrive in time; on a slice that waits for capacity, a later try may succeed.
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
    """Open gloo's connections, and the watch's on the next port, or on any if that is taken."""
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
    """Return this host's place from torchrun's variables where MASTER_ADDR is set, else from the TPU VM.

    torchrun sets RANK, MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: neither source has it, or the number of hosts is not `hw.num_hosts`.
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
