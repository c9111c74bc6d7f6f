"""A request for an answer, in the form of OpenAI's chat completions, and the answers to it in the same form."""

import math
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.task_schema import ServeTaskConfig
from tpu_experiments.data.reading.names import ROLES
from tpu_experiments.data.tokens.chat import Messages

MAX_TEMPERATURE = 100.0


@dataclass(frozen=True)
class Request:
    """What is asked for, checked."""

    model: str
    """Name of the weights that answer."""
    messages: Messages
    max_tokens: int
    temperature: float
    is_stream: bool


def request_of(fields: Any, *, task: ServeTaskConfig, models: list[str]) -> Request:
    """Read a request: `messages`, and optionally `model`, `max_tokens`, `temperature` and `stream`.

    A conversation without a system text has `task.system`; one whose system text is empty has none.

    Raises:
        ConfigError: a field is missing or cannot be what it is.
    """
    if not isinstance(fields, dict):
        raise ConfigError("the request is no JSON object; send messages and the rest as one.")
    model = fields.get("model") or models[0]
    if model not in models:
        raise ConfigError(f"model={model!r}; there is no such model here; use {' or '.join(models)}.")
    if fields.get("n") not in (None, 1):
        raise ConfigError(f"n={fields['n']!r}; a request has one answer; send it again for another.")
    messages = _messages(fields.get("messages"))
    if messages[0][0] == "system" and not messages[0][1].strip():
        messages = messages[1:]  # asked without one
    elif task.system is not None and messages[0][0] != "system":
        messages = (("system", task.system), *messages)
    asked = fields.get("max_completion_tokens", fields.get("max_tokens"))
    max_tokens = task.max_new_tokens if asked is None else asked
    if not _is_number(max_tokens) or max_tokens != int(max_tokens) or not 1 <= max_tokens <= task.max_new_tokens:
        raise ConfigError(f"max_tokens={max_tokens!r}; it must be 1 to {task.max_new_tokens} (task.max_new_tokens).")
    temperature = task.temperature if fields.get("temperature") is None else fields["temperature"]
    if not _is_number(temperature) or not 0 <= temperature <= MAX_TEMPERATURE:
        raise ConfigError(f"temperature={temperature!r}; it must be a number from 0 to {MAX_TEMPERATURE:g}.")
    return Request(model, messages, int(max_tokens), float(temperature), bool(fields.get("stream")))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _messages(given: Any) -> Messages:
    turns = given if isinstance(given, list) else []
    found = tuple(_turn(turn, number=number) for number, turn in enumerate(turns, start=1))
    if not found or found[-1][0] != "user":
        raise ConfigError("messages; it must be a list of turns with role and content, the last of them the user's.")
    return found


def _turn(turn: Any, *, number: int) -> tuple[str, str]:
    fields = turn if isinstance(turn, dict) else {}
    role, content = ROLES.get(str(fields.get("role", "")).lower()), fields.get("content")
    if isinstance(content, list):  # parts, of which the texts count
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = None if any(not isinstance(part, str) for part in parts) else "".join(map(str, parts))
    if role is None or not isinstance(content, str):
        raise ConfigError(f"turn {number} of messages; it needs role (system, user, assistant) and content, a text.")
    return role, content


class Replies:
    """Fields of the answers to one request."""

    def __init__(self, model: str) -> None:
        self._own = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, text: str, *, reason: str, usage: Mapping[str, int]) -> dict[str, Any]:
        """Return the answer to a request without `stream`."""
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
        return {**self._own, "object": "chat.completion", "choices": [choice], "usage": dict(usage)}

    def piece(self, text: str) -> dict[str, Any]:
        """Return an event with more text."""
        return self._event({"role": "assistant", "content": text}, reason=None)

    def last(self, *, reason: str, usage: Mapping[str, int]) -> dict[str, Any]:
        """Return the event after the text."""
        return self._event({}, reason=reason) | {"usage": dict(usage)}

    def _event(self, delta: dict[str, str], *, reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return {**self._own, "object": "chat.completion.chunk", "choices": [choice]}
