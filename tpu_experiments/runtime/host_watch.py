"""Ends this process when another host of its run is gone, wherever its main thread waits.

A program over the chips of several hosts never ends on the others when one of them is killed, and a thread that waits
for it in torch_xla cannot be woken. So each host holds a connection to the first, and a thread of each waits for its
end: at once when the process at the other side ends, after a minute and a half when its machine is gone.
"""

import os
import socket
import sys
import threading
import time

GOODBYE = b"."
LOST_SECONDS = 30.0
"""For the main thread to notice by itself and to close what is open."""
HELLO_SECONDS = 5.0
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""Seconds without a word until the other side is asked, between two such questions, and how many go unanswered."""


class HostWatch:
    """The connections of one host: of the first to all others, of any other to the first."""

    def __init__(self, rank: int, num_hosts: int, *, lost_seconds: float) -> None:
        self._rank, self._num_hosts, self._lost_seconds = rank, num_hosts, lost_seconds
        self._peers: list[socket.socket] = []
        self._is_off = False

    def listen(self, port: int) -> int:
        """On the first host: at this port, or at any where it is taken; the port."""
        self._server = socket.create_server(("", _free(port)), backlog=self._num_hosts)
        return int(self._server.getsockname()[1])

    def accept(self, *, seconds: float) -> None:
        """On the first host: wait so long for every other.

        Raises:
            OSError: one has not come.
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
                else:  # nobody of this run
                    peer.close()

    def connect(self, address: str, port: int, *, seconds: float) -> None:
        """On any other host.

        Raises:
            OSError: the first does not answer.
        """
        peer = socket.create_connection((address, port), timeout=seconds)
        peer.sendall(self._rank.to_bytes(4, "big"))
        self._hold(peer, 0)

    def part(self) -> None:
        """All hosts end alike from here on, each by itself."""
        self.stand_down()
        for peer in self._peers:
            try:
                peer.sendall(GOODBYE)
            except OSError:  # it was faster
                continue

    def stand_down(self) -> None:
        """This process ends by itself from here on."""
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
    """What a host says first; -1 of anything else that has found the port."""
    peer.settimeout(HELLO_SECONDS)
    try:
        said = peer.recv(4, socket.MSG_WAITALL)
    except OSError:
        return -1
    return int.from_bytes(said, "big") if len(said) == 4 else -1


def _free(port: int) -> int:
    """The port, or 0, which stands for any, where another process has it."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return 0
    return port
