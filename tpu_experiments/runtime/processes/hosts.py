"""The hosts of one run: one process each (`hw.parallel=spmd`, `hw.num_hosts`), and what they tell each other.

A program of `spmd` is one program over the chips of all hosts, so every process makes the same calls in the same
order. What a host decides by itself (a request to stop, a clock, an error of its disk) is told to the others over
gloo; they meet on port 29500 of the first host before a device is touched.

A program over several hosts never ends on the others when one of them is killed, and a thread that waits for it in
torch_xla cannot be woken. So each host holds a connection to the first, and a thread of each waits for its end: at
once when the process at the other side ends, after a minute and a half when its machine is gone."""

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import requests
import torch
import torch.distributed as dist

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig

GOODBYE = b"."
LOST_SECONDS = 30.0
"""Time for the main thread to notice the loss by itself and to close its files."""
HELLO_SECONDS = 5.0
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""Idle seconds until the first keepalive probe, seconds between probes, and unanswered probes until it is lost."""


class HostWatch:
    """The connections of one host: those of the first host to all others, that of any other to the first."""

    def __init__(self, rank: int, num_hosts: int, *, lost_seconds: float) -> None:
        self._rank, self._num_hosts, self._lost_seconds = rank, num_hosts, lost_seconds
        self._peers: list[socket.socket] = []
        self._is_off = False

    def listen(self, port: int) -> int:
        """Listen at this port, or at any free one if it is taken, and return the port; on the first host."""
        self._server = socket.create_server(("", _free_port(port)), backlog=self._num_hosts)
        return int(self._server.getsockname()[1])

    def accept(self, *, seconds: float) -> None:
        """Accept the connections of all other hosts within `seconds`; on the first host.

        Raises:
            OSError: a host did not connect in time.
        """
        self._server.settimeout(seconds)
        with self._server:
            missing = set(range(1, self._num_hosts))
            while missing:
                peer, _ = self._server.accept()
                rank = _rank_of(peer)
                if rank in missing:
                    missing.remove(rank)
                    self._watch_peer(peer, rank)
                else:  # not a host of this run
                    peer.close()

    def connect(self, address: str, port: int, *, seconds: float) -> None:
        """Connect to the first host; on any other host.

        Raises:
            OSError: the first host does not answer within `seconds`.
        """
        peer = socket.create_connection((address, port), timeout=seconds)
        peer.sendall(self._rank.to_bytes(4, "big"))
        self._watch_peer(peer, 0)

    def announce_end(self) -> None:
        """Tell the other hosts that the run ends on all of them, so that no end counts as a loss from here on."""
        self.stop_watching()
        for peer in self._peers:
            try:
                peer.sendall(GOODBYE)
            except OSError:  # that host has ended already
                continue

    def stop_watching(self) -> None:
        """Stop watching: this process ends by itself from here on."""
        self._is_off = True

    def _watch_peer(self, peer: socket.socket, rank: int) -> None:
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._peers.append(peer)
        threading.Thread(target=self._wait, args=(peer, rank), name=f"host {rank}", daemon=True).start()

    def _wait(self, peer: socket.socket, rank: int) -> None:
        try:
            received = peer.recv(1)
        except OSError:
            received = b""
        if received == GOODBYE or self._is_off:
            return
        time.sleep(self._lost_seconds)
        if self._is_off:
            return
        print(
            f"error: host {self._rank} of {self._num_hosts} lost host {rank}; that host's log says why. The same "
            "command, on every host, resumes the run.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def _rank_of(peer: socket.socket) -> int:
    """Return the rank that a host sends first; -1 for any other client of the port."""
    peer.settimeout(HELLO_SECONDS)
    try:
        received = peer.recv(4, socket.MSG_WAITALL)
    except OSError:
        return -1
    return int.from_bytes(received, "big") if len(received) == 4 else -1


def _free_port(port: int) -> int:
    """Return the port, or 0 (any port) if another process uses it."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return 0
    return port


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

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        first: str = "127.0.0.1",
        watch: HostWatch | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Take the address of the first host, and the connections to the others."""
        self.rank, self.size, self.first, self._watch, self._group = rank, size, first, watch, group

    def for_thread(self) -> "Hosts":
        """Return the same hosts with connections of their own, for another thread; a collective.

        Collectives of two threads over the same connections would be taken for each other.
        """
        if self.size == 1:
            return self
        group = dist.new_group(timeout=timedelta(seconds=ANSWER_SECONDS), backend="gloo")
        return Hosts(self.rank, self.size, first=self.first, watch=self._watch, group=group)

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is True on any host."""
        if self.size == 1:
            return flag
        votes = torch.tensor([int(flag)], dtype=torch.int32)
        self._exchange(lambda: dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group))
        return bool(votes.item())

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all hosts, by rank; they must be picklable."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        self._exchange(lambda: dist.all_gather_object(found, value, group=self._group))
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
        failures = self.gather(None if error is None else (isinstance(error, ConfigError), f"{error}"))
        if error is not None:
            raise error
        for rank, complaint in enumerate(failures):
            if complaint is not None:
                is_of_user, text = complaint
                raise ConfigError(text) if is_of_user else HostLost(f"host {rank} of {self.size} failed: {text}")
        return result  # type: ignore[return-value]

    def on_first_host(self, action: Callable[[], object]) -> None:
        """Run `action` on the first host while the others wait; a failure raises on all, as in `together`."""
        self.together(action if self.rank == 0 else lambda: None)

    def announce_end(self) -> None:
        """Announce that the run ends on every host, so that none takes another's end for a loss."""
        if self._watch is not None:
            self._watch.announce_end()

    def _exchange(self, exchange: Callable[[], object]) -> None:
        try:
            exchange()
        except RuntimeError as error:
            if self._watch is not None:
                self._watch.stop_watching()
            raise HostLost(
                f"host {self.rank} of {self.size} lost another ({_first_line(error)}); that host's log says why."
            ) from error


_joined = Hosts()


def joined() -> Hosts:
    """Return the hosts of this process's run; a single one before `rendezvous`."""
    return _joined


def rendezvous(hw: HwConfig, *, seconds: float = MEET_SECONDS, lost_seconds: float = LOST_SECONDS) -> Hosts:
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
    _joined = Hosts(place.rank, hw.num_hosts, first=place.address, watch=watch)
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
        size, place = _place_from_torchrun(hw) if "MASTER_ADDR" in os.environ else _place_from_slice(hw)
    except (OSError, KeyError, IndexError, ValueError) as error:  # requests' errors are OSErrors
        raise ConfigError(
            f"hw.num_hosts={hw.num_hosts} with hw.device={hw.device}; the rank of this host is unknown "
            f"({_first_line(error)}); set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does."
        ) from error
    if size != hw.num_hosts or not 0 <= place.rank < size:
        raise ConfigError(
            f"hw.num_hosts={hw.num_hosts}; this is host {place.rank} of {size}; choose the hw= of this slice, or start "
            "the command on all of its hosts."
        )
    return place


def _place_from_torchrun(hw: HwConfig) -> tuple[int, Place]:
    given = os.environ
    size, rank, port = (
        int(given.get("WORLD_SIZE", hw.num_hosts)),
        int(given["RANK"]),
        int(given.get("MASTER_PORT", PORT)),
    )
    return size, Place(rank, given["MASTER_ADDR"], port)


def _place_from_slice(hw: HwConfig) -> tuple[int, Place]:
    if hw.device != "tpu":
        raise ValueError("it is no worker of a slice")
    rank, addresses = workers()
    return len(addresses), Place(rank, addresses[0])


METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes"


def workers() -> tuple[int, list[str]]:
    """Return the index of this worker of a slice and the addresses of all by index, without torch_xla.

    On GKE they are in TPU_WORKER_ID and TPU_WORKER_HOSTNAMES, on a TPU VM in its metadata (as jax reads them:
    jax/_src/clusters/cloud_tpu_cluster.py).
    """
    if "TPU_WORKER_HOSTNAMES" in os.environ:
        return int(os.environ["TPU_WORKER_ID"]), os.environ["TPU_WORKER_HOSTNAMES"].split(",")

    def told(key: str) -> str:
        answer = requests.get(f"{METADATA}/{key}", headers={"Metadata-Flavor": "Google"}, timeout=10)
        answer.raise_for_status()
        return answer.text

    endpoints = told("worker-network-endpoints").split(",")  # name:uid:address,name:uid:address,...
    return int(told("agent-worker-number")), [endpoint.split(":")[2] for endpoint in endpoints]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
