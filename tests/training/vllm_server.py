"""A server that speaks the part of vLLM's protocol that rollouts need, over real sockets, with faults to order.

Written from vLLM 0.32 (entrypoints/openai/completion, models/serving, serve/lora): the same fields, defaults, statuses
and sentences. What draws tokens is given; a fault is a function of an answer, or an HTTP status, for the next requests.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Body = dict[str, Any]
Draw = Callable[[Body, str | None], list[tuple[list[int], list[float | None]]]]
"""Answers, ids and log-probabilities, to a request, by the base or the adapter in the folder."""
Fault = int | Callable[["Exchange"], None]
BASE = "base"


@dataclass
class Exchange:
    """A request for completions and what is answered, which a fault changes."""

    body: Body
    answer: Body
    raw: bytes | None = None
    """Sent in the place of the answer."""
    closes: bool = False
    """Whether the connection is closed without an answer."""


@dataclass
class VllmServer:
    """What the server knows; `url` once it runs."""

    draw: Draw
    decode: Callable[[list[int]], str]
    max_model_len: int = 64
    max_loras: int = 2
    loads_adapters: bool = True
    api_key: str | None = None
    url: str = ""
    loras: dict[str, str] = field(default_factory=dict)
    faults: deque[Fault] = field(default_factory=deque)
    load_faults: deque[int] = field(default_factory=deque)
    asked: list[Body] = field(default_factory=list)
    """Requests for completions, in the order of arrival."""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """(load or unload, name) in order."""
    most_loras: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def post(self, path: str, body: Body) -> tuple[int, Body | str | Exchange]:
        if path == "/v1/completions":
            return self.complete(body)
        if path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter") and self.loads_adapters:
            return self.load(body) if "/load" in path else self.unload(body)
        return 404, {"detail": "Not Found"}

    def models(self) -> Body:
        base = {"id": BASE, "object": "model", "root": "path", "parent": None, "max_model_len": self.max_model_len}
        return {
            "object": "list",
            "data": [base, *({"id": each, "parent": BASE, "root": self.loras[each]} for each in self.loras)],
        }

    def load(self, body: Body) -> tuple[int, Body | str]:
        name, folder = body["lora_name"], body["lora_path"]
        with self.lock:
            self.calls.append(("load", name))
            if self.load_faults:
                return error(self.load_faults.popleft(), "the engine is not ready")
            if name in self.loras:
                return error(
                    400,
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
                    "place, set 'load_inplace' to True.",
                )
            if not (Path(folder) / "adapter_config.json").is_file():
                return error(404, f"No adapter found for {folder}")
            self.loras[name] = folder
            self.most_loras = max(self.most_loras, len(self.loras))
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, body: Body) -> tuple[int, Body | str]:
        name = body["lora_name"]
        with self.lock:
            self.calls.append(("unload", name))
            if self.loras.pop(name, None) is None:
                return error(404, f"The lora adapter '{name}' cannot be found.")
        return 200, f"Success: LoRA adapter '{name}' removed successfully."

    def complete(self, body: Body) -> tuple[int, Body | Exchange]:
        with self.lock:
            self.asked.append(body)
            fault = self.faults.popleft() if self.faults else None
            folder = self.loras.get(body["model"])
        if isinstance(fault, int):
            return error(fault, "the engine is not ready")
        if folder is None and body["model"] != BASE:
            return error(404, f"The model `{body['model']}` does not exist.")
        if len(body["prompt"]) >= self.max_model_len:
            return error(400, f"This model's maximum context length is {self.max_model_len} tokens.")
        if body["temperature"] == 0 and body["n"] > 1:
            return error(400, f"n must be 1 when using greedy sampling, got {body['n']}.")
        choices = []
        for index, (ids, log_probs) in enumerate(self.draw(body, folder)):
            is_stopped = ids[-1] in body["stop_token_ids"]
            shown = [None if value is None else max(value, -9999.0) for value in log_probs]
            choice = {"index": index, "text": self.decode(ids[: len(ids) - is_stopped])}
            choice |= {
                "finish_reason": "stop" if is_stopped else "length",
                "stop_reason": ids[-1] if is_stopped else None,
            }
            choice |= {
                "logprobs": {
                    "token_logprobs": shown,
                    "tokens": [self.decode([i]) for i in ids],
                    "top_logprobs": [],
                    "text_offset": [],
                }
            }
            choice |= {"token_ids": ids, "prompt_token_ids": body["prompt"]} if body.get("return_token_ids") else {}
            choices.append(choice)
        exchange = Exchange(
            body, {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": choices}
        )
        if fault is not None:
            fault(exchange)
        return 200, exchange


def error(status: int, message: str) -> tuple[int, Body]:
    return status, {"error": {"message": message, "type": "Error", "param": None, "code": status}}


@contextmanager
def served(server: VllmServer, *, port: int = 0) -> Iterator[VllmServer]:
    """Serve inside the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send(200, server.models()) if self.is_allowed() else self.send(401, {"error": "Unauthorized"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.is_allowed():
                self.send(401, {"error": "Unauthorized"})
                return
            try:
                status, found = server.post(self.path, body)
            except Exception as failed:
                status, found = error(500, f"{type(failed).__name__}: {failed}")
            if isinstance(found, Exchange):
                if found.closes:
                    self.close_connection = True
                    return
                found = found.raw if found.raw is not None else found.answer
            self.send(status, found)

        def is_allowed(self) -> bool:
            return server.api_key is None or self.headers["Authorization"] == f"Bearer {server.api_key}"

        def send(self, status: int, found: Body | str | bytes) -> None:
            data = (
                found if isinstance(found, bytes) else (found if isinstance(found, str) else json.dumps(found)).encode()
            )
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except ConnectionError:  # the client gave up
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


# ---- faults --------------------------------------------------------------------------------------------------------


def closes(exchange: Exchange) -> None:
    exchange.closes = True


def waits(seconds: float) -> Callable[[Exchange], None]:
    return lambda _: time.sleep(seconds)


def no_json(exchange: Exchange) -> None:
    exchange.raw = b"<html>log in</html>"


def half(exchange: Exchange) -> None:
    """Break off in the middle of the JSON."""
    exchange.raw = json.dumps(exchange.answer).encode()[:-20]


def of_model(name: str) -> Callable[[Exchange], None]:
    def change(exchange: Exchange) -> None:
        exchange.answer["model"] = name

    return change


def of_choice(**fields: Any) -> Callable[[Exchange], None]:
    """Put fields of the last choice; None takes one away, a function changes it."""

    def change(exchange: Exchange) -> None:
        choice = exchange.answer["choices"][-1]
        for name, value in fields.items():
            choice[name] = value(choice[name]) if callable(value) else value
            if value is None:
                del choice[name]

    return change


def fewer(exchange: Exchange) -> None:
    del exchange.answer["choices"][-1]
