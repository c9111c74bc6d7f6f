"""Connections to task=serve: an address bound before the weights are loaded, and clients that send too slowly.

uvicorn ends connections that are silent after an answer, and none that never finish a request.
"""

import asyncio
import ipaddress
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.task_schema import ServeTaskConfig

MAX_CONNECTIONS = 512
"""Open connections; beyond, the one that has sent an unfinished request for longest makes room."""
RECEIVING_SECONDS = 20.0
"""Longest time to send a request."""
LEAVING_SECONDS = 2
"""Time to send what is left when the server ends."""


def bound(task: ServeTaskConfig) -> socket.socket:
    """Return a socket that listens; connections wait until the server runs.

    Raises:
        ConfigError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in task.host else socket.AF_INET
    try:
        return socket.create_server((task.host, task.port), family=family, backlog=MAX_CONNECTIONS)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"task.host={task.host} task.port={task.port}; nothing can listen there "
            f"({getattr(error, 'strerror', None) or error}); name another port, or 0 for a free one."
        ) from error


def is_local(host: str) -> bool:
    """Return whether only this machine reaches a server at this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Connection(H11Protocol):
    """A connection that is closed where its client takes too long to send a request."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > MAX_CONNECTIONS:
            waiting = (one for one in self.connections if isinstance(one, Connection) and one._deadline is not None)
            min(waiting, key=lambda one: one._deadline.when()).transport.abort()  # type: ignore[union-attr]

    def data_received(self, data: bytes) -> None:
        """Read on; a request that is whole is no longer waited for."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline."""
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def _watch(self) -> None:
        is_whole = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if is_whole and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif not is_whole and self._deadline is None:
            self._deadline = self.loop.call_later(RECEIVING_SECONDS, self.transport.abort)


def server_of(app: Any) -> uvicorn.Server:
    """Return the HTTP server of an application; it logs errors alone, and believes no header about the client."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=LEAVING_SECONDS,
    )
    return uvicorn.Server(config)
