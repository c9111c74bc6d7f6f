"""The web application of task=serve: one page, and OpenAI's chat completions, plain and as server-sent events.

A page of another site must not reach the model through the visitor's browser. So a request names this server in `Host`
(a name that was rebound to its address is another one), and an `Origin`, which browsers add, is this server's own.
Where other machines reach it, a request has a token as well.
"""

import asyncio
import ipaddress
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from fastapi import Depends, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.task_schema import ServeTaskConfig
from tpu_experiments.models.passes.generation import Sampling
from tpu_experiments.pages.page import page
from tpu_experiments.tasks.generate.conversation import fitted
from tpu_experiments.tasks.serve.connections import RECEIVING_SECONDS, is_local
from tpu_experiments.tasks.serve.requests import ChatRequest, Replies
from tpu_experiments.tasks.serve.writer import Busy, End, Job, Piece, Question, Stopped, Writer

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 2**20
"""Largest request: far more text than the longest prompt holds."""
TOKEN_VARIABLE = "TPU_EXPERIMENTS_SERVE_TOKEN"
MIN_TOKEN_LENGTH = 16
RETRY_SECONDS = 5
"""When to come again, where too many requests wait."""
LEAVING_CHECK_SECONDS = 0.5
"""Longest time until a client that has left is noticed."""
LINGERING_SECONDS = 1.0
"""Longest time that the rest of a refused body is read."""
MAX_SHOWN = 80
"""Characters of a refused value that its refusal repeats."""
Pieces = AsyncIterator[tuple[int, str | End]]


def token_of(task: ServeTaskConfig) -> str | None:
    """Return the token that requests need: the environment's, or one made now; None on this machine alone.

    Raises:
        ConfigError: the environment's cannot be sent in a header, or is short.
    """
    given = os.environ.get(TOKEN_VARIABLE)
    if not given:
        return None if is_local(task.host) else secrets.token_urlsafe(24)
    if len(given) < MIN_TOKEN_LENGTH or not (given.isascii() and given.isprintable() and " " not in given):
        raise ConfigError(
            f"{TOKEN_VARIABLE}; it has {len(given)} characters; a token has at least {MIN_TOKEN_LENGTH}, letters and "
            "digits without blanks; set another, or unset it for one that is made and printed."
        )
    return given


class Refusal(HTTPException):
    """A request that is not answered, in OpenAI's form."""

    def __init__(
        self,
        status: HTTPStatus,
        text: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, text, headers)
        self.param, self.code = param, code


KINDS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
"""OpenAI's `type` of an error; the other 4xx are `invalid_request_error`, and 5xx `server_error`."""


def refused(error: HTTPException) -> JSONResponse:
    """Return the answer to a request that is refused."""
    other = "server_error" if error.status_code >= 500 else "invalid_request_error"
    fields = {
        "message": str(error.detail),
        "type": KINDS.get(HTTPStatus(error.status_code), other),
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None),
    }
    return JSONResponse({"error": fields}, status_code=error.status_code, headers=error.headers)


def refusal_of(error: Exception) -> Refusal:
    """Return the refusal for what prevents an answer."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, Stopped):
        return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the server ends; ask again when it is back.")
    if isinstance(error, Busy):
        return Refusal(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"too many requests wait; ask again in {RETRY_SECONDS} seconds.",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(RETRY_SECONDS)},
        )
    if isinstance(error, ConfigError):
        return Refusal(HTTPStatus.BAD_REQUEST, str(error), param="messages")
    return Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "the answer failed; the server's log says why.")


def invalid(error: RequestValidationError) -> Refusal:
    """Return the refusal of a request whose first wrong field it names."""
    first = error.errors()[0]
    _, *place = first["loc"]
    if first["type"] == "json_invalid":
        return Refusal(HTTPStatus.BAD_REQUEST, f"the body is not JSON ({first['ctx']['error']}); send one object.")
    param = ".".join(map(str, place)) or None
    shown = json.dumps(first.get("input"), default=str)
    shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
    if first["type"] == "extra_forbidden":
        text, code = f"{param}={shown}; it is not done here, and would change nothing; leave it out.", "unsupported"
    elif first["type"] == "missing":
        text, code = f"{param}; it is missing; send it.", "missing"
    else:
        said = first["msg"].removeprefix("Value error, ")
        text, code = f"{param or 'the body'}={shown}; {said[:1].lower()}{said[1:]}; mend it.", "invalid_value"
    return Refusal(HTTPStatus.BAD_REQUEST, text, param=param, code=code)


class Door:
    """What every request passes: names, token and size, and the time it may take; every answer has its headers."""

    def __init__(self, app: ASGIApp, *, task: ServeTaskConfig, port: int, token: str | None, nonce: str) -> None:
        self.app, self.task, self.port, self.token = app, task, port, token
        self.headers = {
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "content-security-policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or refuse it."""
        size, is_whole = 0, False

        async def received() -> Message:
            nonlocal is_whole
            message = await receive()
            is_whole = not message.get("more_body", False)
            return message

        async def limited() -> Message:
            nonlocal size
            message = await received()
            size += len(message.get("body", b""))
            if size > MAX_BODY_BYTES:
                raise too_large(size)
            return message

        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Closed while it sends, a client would see a broken connection in the place of the answer.
                with suppress(TimeoutError):
                    async with asyncio.timeout(LINGERING_SECONDS):
                        while not is_whole:
                            await received()
                own = [(name.encode(), value.encode()) for name, value in self.headers.items()]
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)

        try:
            self.check(Request(scope))
        except Refusal as error:
            await refused(error)(scope, receive, headed)
            return
        try:
            async with asyncio.timeout(self.task.max_seconds + RECEIVING_SECONDS):
                await self.app(scope, limited, headed)
        except TimeoutError:
            log.warning("a client did not read its answer in task.max_seconds=%g", self.task.max_seconds)

    def check(self, request: Request) -> None:
        """Raise Refusal for a request that may not enter."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not is_own_name(host, task=self.task):
            own = f"http://{self.task.host}:{self.port}/"
            raise Refusal(HTTPStatus.FORBIDDEN, f"Host: {host}; this server has another name; use {own}.")
        if origin is not None and origin.lower() != f"http://{host}".lower():
            raise Refusal(HTTPStatus.FORBIDDEN, f"Origin: {origin}; only the page of this server may ask it.")
        if self.token is not None and not self.is_known(request, self.token):
            raise Refusal(
                HTTPStatus.UNAUTHORIZED,
                "Authorization; the token is missing or another; send `Bearer TOKEN`, or open the printed address.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if int(request.headers.get("content-length", 0)) > MAX_BODY_BYTES:
            raise too_large(request.headers["content-length"])
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            raise Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body is no application/json; send it so.")

    def is_known(self, request: Request, token: str) -> bool:
        """Return whether a request has the token: in its header, or for the page in the address."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if request.url.path == "/" and not scheme:
            scheme, given = "bearer", request.query_params.get("token", "")
        return scheme.lower() == "bearer" and secrets.compare_digest(given.strip().encode(), token.encode())


def too_large(size: int | str) -> Refusal:
    """Return the refusal of a body with so many bytes."""
    text = f"the body has {size} bytes; at most {MAX_BODY_BYTES} are read."
    return Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)


def is_own_name(host: str, *, task: ServeTaskConfig) -> bool:
    """Return whether the value of a `Host` header names this server: by address, or as this machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name and name in ("localhost", task.host.lower()):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return not is_local(task.host) and name == socket.gethostname().lower()
    return address.is_loopback or not is_local(task.host)


def application(
    writer: Writer, *, task: ServeTaskConfig, port: int, token: str | None, title: str, texts: Mapping[str, str]
) -> ASGIApp:
    """Return what answers requests.

    Args:
        token: that every request must have; None for no token.
        texts: where the weights of each model come from.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    nonce = secrets.token_urlsafe(16)
    models = [{"name": name, "text": text} for name, text in texts.items()]
    html = page("chat.html", title=title, models=models, task=task, nonce=nonce)

    @app.api_route("/", methods=["GET", "HEAD"])
    async def _page() -> HTMLResponse:
        return HTMLResponse(html)

    _refuse_in_one_form(app)
    _list_models(app, texts)
    _answer_chats(app, writer, task=task, names=list(texts))
    return Door(app, task=task, port=port, token=token, nonce=nonce)


def _refuse_in_one_form(app: FastAPI) -> None:
    """Have every error answered in OpenAI's form."""

    @app.exception_handler(HTTPException)
    async def _refused(request: Request, error: HTTPException) -> Response:
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED and request.method == "OPTIONS":
            allowed = (error.headers or {}).get("Allow", "")
            return Response(status_code=HTTPStatus.NO_CONTENT, headers={"Allow": f"{allowed}, OPTIONS"})
        if error.status_code == HTTPStatus.NOT_FOUND and not isinstance(error, Refusal):
            error.detail = f"{request.url.path}; nothing answers there; use / or /v1/chat/completions."
        return refused(error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> Response:
        return refused(invalid(error))

    @app.exception_handler(Exception)
    async def _failed(_: Request, error: Exception) -> Response:
        return refused(refusal_of(error))


def _list_models(app: FastAPI, names: Iterable[str]) -> None:
    """Have requests for the list of models, and for one of them, answered."""
    created = int(time.time())
    listed = {
        name: {"id": name, "object": "model", "created": created, "owned_by": "tpu_experiments"} for name in names
    }

    @app.api_route("/v1/models", methods=["GET", "HEAD"])
    async def _models() -> dict[str, Any]:
        return {"object": "list", "data": list(listed.values())}

    @app.api_route("/v1/models/{name:path}", methods=["GET", "HEAD"])
    async def _model(name: str) -> dict[str, Any]:
        _require_model(name, listed)
        return listed[name]


def _require_model(name: str, names: Collection[str]) -> None:
    if name not in names:
        text = f"model={name!r}; there is no such model here; use {' or '.join(names)}."
        raise Refusal(HTTPStatus.NOT_FOUND, text, param="model", code="model_not_found")


def _answer_chats(app: FastAPI, writer: Writer, *, task: ServeTaskConfig, names: Sequence[str]) -> None:
    """Have conversations answered by the writer."""
    locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def visit(request: Request) -> AsyncIterator[list[Job]]:
        """Count a request until its answer is sent or its client has left."""
        try:
            with writer.admitted(client_of(request)) as jobs:
                yield jobs
        except Busy as error:
            raise refusal_of(error) from error

    @app.post("/v1/chat/completions")
    async def _chat(asked: ChatRequest, request: Request, jobs: list[Job] = Depends(visit)) -> Response:  # noqa: B008
        ends_at = asyncio.get_running_loop().time() + task.max_seconds
        client, name = client_of(request), asked.model or names[0]
        _require_model(name, names)
        lock = locks.setdefault(client, asyncio.Lock())
        try:  # one conversation of a client at a time is tokenized
            async with asyncio.timeout_at(ends_at), lock:
                question, usage = await run_in_threadpool(question_of, asked, name, task=task, writer=writer)
        except ConfigError as error:
            raise refusal_of(error) from error
        except TimeoutError as error:
            raise too_slow(task) from error
        pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        jobs += [Job(question, index, asked.draw(index), pieces) for index in range(asked.n)]
        try:
            writer.ask(jobs, client=client)
        except Stopped as error:
            raise refusal_of(error) from error
        return await _replied(asked, pieces_of(pieces, request, num=asked.n, task=task, ends_at=ends_at), name, usage)


async def _replied(asked: ChatRequest, answers: Pieces, model: str, usage: dict[str, int]) -> Response:
    """Return the answers, as events while they are written or whole; nothing to a client that has left."""
    replies = Replies(model)
    first = await anext(answers, None)  # what is refused has its status, so nothing is sent before
    if first is None:
        return Response()
    if asked.stream:
        wants_usage = asked.stream_options.include_usage
        events = events_of(first, answers, replies, usage=usage, wants_usage=wants_usage)
        return StreamingResponse(events, media_type="text/event-stream")
    texts, reasons = [""] * asked.n, [""] * asked.n
    async for index, piece in _chained(first, answers):
        if isinstance(piece, End):
            reasons[index] = piece.reason
            _count(usage, piece)
        else:
            texts[index] += piece
    return JSONResponse(replies.whole(texts, reasons=reasons, usage=usage))


def client_of(request: Request) -> str:
    """Return the address that a request comes from."""
    return request.client.host if request.client is not None else ""


def too_slow(task: ServeTaskConfig) -> Refusal:
    """Return the refusal of a request that has had its time."""
    text = f"the answer took longer than task.max_seconds={task.max_seconds:g}; ask for fewer tokens, or later."
    return Refusal(HTTPStatus.GATEWAY_TIMEOUT, text, code="timeout")


def question_of(
    asked: ChatRequest, model: str, *, task: ServeTaskConfig, writer: Writer
) -> tuple[Question, dict[str, int]]:
    """Return what a request asks for, and the beginning of its counts of tokens.

    Raises:
        ConfigError: the conversation is refused by the chat template, or its last turn is too long.
        Refusal: more tokens are asked for than the command allows.
    """
    most, field = task.max_new_tokens, "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(asked, field)
    max_tokens = most if max_tokens is None else max_tokens
    if not 1 <= max_tokens <= most:
        text = f"{field}={max_tokens}; it must be 1 to {most} (task.max_new_tokens)."
        raise Refusal(HTTPStatus.BAD_REQUEST, text, param=field, code="invalid_value")
    reader = writer.models[model].reader
    prompt, ids, num_left_out = fitted(asked.conversation(task), reader=reader, place="the conversation")
    temperature = task.temperature if asked.temperature is None else asked.temperature
    sampling = Sampling(temperature, task.top_p if asked.top_p is None else asked.top_p)
    question = Question(model, prompt, ids, max_tokens, sampling, tuple(asked.stop))
    usage = {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)}
    return question, usage | {"turns_left_out": num_left_out}


async def pieces_of(
    pieces: "asyncio.Queue[tuple[int, Piece]]", request: Request, *, num: int, task: ServeTaskConfig, ends_at: float
) -> Pieces:
    """Yield the texts of `num` answers as they come, and their ends; no more when the client has left.

    Raises:
        Refusal: an answer failed, or took too long.
    """
    loop = asyncio.get_running_loop()
    while num:
        if await request.is_disconnected():
            return
        try:
            wait = min(LEAVING_CHECK_SECONDS, ends_at - loop.time())
            index, piece = await asyncio.wait_for(pieces.get(), max(wait, 0))
        except TimeoutError:
            if loop.time() < ends_at:
                continue
            raise too_slow(task) from None
        if isinstance(piece, Exception):
            raise refusal_of(piece) from piece
        num -= isinstance(piece, End)
        yield index, piece


async def _chained(first: tuple[int, str | End], rest: Pieces) -> Pieces:
    yield first
    async for one in rest:
        yield one


def _count(usage: dict[str, int], end: End) -> None:
    usage["completion_tokens"] += end.num_tokens
    usage["total_tokens"] += end.num_tokens


async def events_of(
    first: tuple[int, str | End], rest: Pieces, replies: Replies, *, usage: dict[str, int], wants_usage: bool
) -> AsyncIterator[str]:
    """Yield server-sent events; an error after the first of them is an event as well."""
    try:
        async for index, piece in _chained(first, rest):
            if isinstance(piece, End):
                _count(usage, piece)
                yield _event(replies.last(index=index, reason=piece.reason))
            else:
                yield _event(replies.piece(piece, index=index))
        if wants_usage:
            yield _event(replies.usage(usage))
        yield "data: [DONE]\n\n"
    except Refusal as error:
        yield f"data: {bytes(refused(error).body).decode()}\n\n"


def _event(fields: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(fields)}\n\n"
