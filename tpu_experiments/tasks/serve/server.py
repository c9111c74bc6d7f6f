"""The HTTP server of task=serve: one page, and OpenAI's chat completions, plain and as server-sent events.

A page of another site must not reach the model through the visitor's browser. So a request names this server in `Host`
(a name that was rebound to its address is another one), and an `Origin`, which browsers add, is this server's own.
"""

import ipaddress
import json
import logging
import secrets
import socket
import sys
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.task_schema import ServeTaskConfig
from tpu_experiments.pages.page import page
from tpu_experiments.tasks.serve.requests import Replies, Request, request_of
from tpu_experiments.tasks.serve.writer import End, Job, Writer, pieces_of

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 2**20
"""Largest request: far more text than the longest prompt holds."""
TIMEOUT_SECONDS = 60.0
"""Longest silence of a client in the middle of a request."""


class ChatServer(ThreadingHTTPServer):
    """Server bound to its address from the start; connections wait until `serve_forever`.

    Raises:
        ConfigError: the address cannot be bound.
    """

    daemon_threads = True
    writer: Writer
    html: str

    def __init__(self, task: ServeTaskConfig) -> None:
        self.task, self.nonce = task, secrets.token_urlsafe(16)
        if ":" in task.host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((task.host, task.port), Handler)
        except OSError as error:
            raise ConfigError(
                f"task.host={task.host} task.port={task.port}; nothing can listen there ({error.strerror or error}); "
                "name another port, or 0 for a free one."
            ) from error

    @property
    def address(self) -> str:
        """Return the page's address."""
        host = f"[{self.task.host}]" if ":" in self.task.host else self.task.host
        return f"http://{host}:{self.server_port}/"

    def open(self, writer: Writer, *, title: str, texts: Mapping[str, str]) -> None:
        """Set what answers.

        Args:
            texts: where the weights of each model come from.
        """
        self.writer = writer
        self.html = page(
            "chat.html",
            title=title,
            models=[{"name": name, "text": text} for name, text in texts.items()],
            task=self.task,
            nonce=self.nonce,
        )

    def is_own_name(self, host: str) -> bool:
        """Return whether the value of a `Host` header names this server: by address, or as this machine."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in ("localhost", self.task.host.lower()):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return not self._is_local and name == socket.gethostname().lower()
        return address.is_loopback or not self._is_local

    @property
    def _is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        try:
            return ipaddress.ip_address(self.task.host).is_loopback
        except ValueError:
            return self.task.host == "localhost"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of one connection; a client that has left is none."""
        if not isinstance(sys.exception(), OSError):
            log.error("a request of %s was not answered", client_address, exc_info=True)


class Refusal(Exception):
    """A request that is not answered, with its status."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    """One connection: one request."""

    server: ChatServer
    server_version, sys_version = "tpu_experiments", ""
    timeout = TIMEOUT_SECONDS

    def do_GET(self) -> None:
        """Answer with the page, or the list of models."""
        try:
            self._require_own_names()
            if self.path == "/":
                self._send(self.server.html.encode(), kind="text/html; charset=utf-8")
            elif self.path == "/v1/models":
                models = [{"id": name, "object": "model"} for name in self.server.writer.models]
                self._send_json({"object": "list", "data": models})
            else:
                raise Refusal(HTTPStatus.NOT_FOUND, f"{self.path}; there is no such page; the page is /.")
        except Refusal as error:
            self._refuse(error)

    def do_POST(self) -> None:
        """Answer a conversation."""
        try:
            self._require_own_names()
            if self.path != "/v1/chat/completions":
                raise Refusal(HTTPStatus.NOT_FOUND, f"{self.path}; nothing answers there; use /v1/chat/completions.")
            models = list(self.server.writer.models)
            request = request_of(self._fields(), task=self.server.task, models=models)
            job = self.server.writer.ask(request)
            if job is None:
                raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests wait; try again later.")
            self._answer(job, request)
        except ConfigError as error:
            self._refuse(Refusal(HTTPStatus.BAD_REQUEST, str(error)))
        except Refusal as error:
            self._refuse(error)

    def _require_own_names(self) -> None:
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if not self.server.is_own_name(host):
            raise Refusal(
                HTTPStatus.FORBIDDEN, f"Host: {host}; this server has another name; use {self.server.address}."
            )
        if origin is not None and origin.lower() != f"http://{host}".lower():
            raise Refusal(HTTPStatus.FORBIDDEN, f"Origin: {origin}; only the page of this server may ask it.")

    def _fields(self) -> Any:
        """Read the body."""
        if self.headers.get_content_type() != "application/json":
            raise Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body is no application/json; send it so.")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise Refusal(HTTPStatus.LENGTH_REQUIRED, "Content-Length is missing; send it.")
        if len(length) > 9 or int(length) > MAX_BODY_BYTES:
            raise Refusal(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has {length} bytes; at most {MAX_BODY_BYTES} are read."
            )
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the body is not JSON ({error}); send one object.") from error

    def _answer(self, job: Job, request: Request) -> None:
        pieces, replies = pieces_of(job), Replies(request.model)
        first = next(pieces)  # a refused conversation has its status, so nothing is sent before
        if not request.is_stream:
            text, piece = "", first
            while not isinstance(piece, End):
                text += piece
                piece = next(pieces)
            self._send_json(replies.whole(text, reason=piece.reason, usage=piece.usage))
            return
        self._head("text/event-stream; charset=utf-8", length=None)
        piece = first
        while not isinstance(piece, End):
            self._event(json.dumps(replies.piece(piece)))
            piece = next(pieces)
        self._event(json.dumps(replies.last(reason=piece.reason, usage=piece.usage)))
        self._event("[DONE]")

    def _event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def _refuse(self, error: Refusal) -> None:
        fields = {"message": str(error), "type": "invalid_request_error", "code": int(error.status)}
        self._send_json({"error": fields}, status=error.status)

    def _send_json(self, fields: dict[str, Any], *, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(json.dumps(fields).encode(), kind="application/json", status=status)

    def _send(self, body: bytes, *, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._head(kind, length=len(body), status=status)
        self.wfile.write(body)

    def _head(self, kind: str, *, length: int | None, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header(
            "Content-Security-Policy",
            f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{self.server.nonce}'; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        )
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log a request at the level of debugging: the writer logs each answer."""
        log.debug(format, *args)
