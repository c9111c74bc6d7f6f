"""Ends this process when another host of its run is gone, whatever its main thread is blocked in.

A program over the chips of several hosts never ends on the others when one host is killed, and a thread that is blocked
on it in torch_xla cannot be woken. So each host keeps a connection to the first, and a thread of each detects its end:
at once when the process at the other side ends, after 90 s when its machine is gone.
"""

import os
import socket
import sys
import threading
import time

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
        self._server = socket.create_server(("", _free(port)), backlog=self._num_hosts)
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
                    self._hold(peer, rank)
                else:  # not a host of this run
                    peer.close()

    def connect(self, address: str, port: int, *, seconds: float) -> None:
        """Connect to the first host; on any other host.

        Raises:
            OSError: the first host does not answer within `seconds`.
        """
        peer = socket.create_connection((address, port), timeout=seconds)
        peer.sendall(self._rank.to_bytes(4, "big"))
        self._hold(peer, 0)

    def part(self) -> None:
        """Tell the other hosts that the run ends on all of them, so that no end counts as a loss from here on."""
        self.stand_down()
        for peer in self._peers:
            try:
                peer.sendall(GOODBYE)
            except OSError:  # that host has ended already
                continue

    def stand_down(self) -> None:
        """Stop watching: this process ends by itself from here on."""
        self._is_off = True

    def _hold(self, peer: socket.socket, rank: int) -> None:
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._peers.append(peer)
        threading.Thread(target=self._wait, args=(peer, rank), name=f"host {rank}", daemon=True).start()

    def _wait(self, peer: socket.socket, rank: int) -> None:
        try:
            said = peer.recv(1)
        except OSError:
            said = b""
        if said == GOODBYE or self._is_off:
            return
        time.sleep(self._lost_seconds)
        if self._is_off:
            return
        print(
            f"error: host {self._rank} of {self._num_hosts} lost host {rank}; that host's log says why. The same "
            "command, on every host, goes on.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def _rank_of(peer: socket.socket) -> int:
    """Return the rank that a host sends first; -1 for any other client of the port."""
    peer.settimeout(HELLO_SECONDS)
    try:
        said = peer.recv(4, socket.MSG_WAITALL)
    except OSError:
        return -1
    return int.from_bytes(said, "big") if len(said) == 4 else -1


def _free(port: int) -> int:
    """Return the port, or 0 (any port) if another process uses it."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return 0
    return port
