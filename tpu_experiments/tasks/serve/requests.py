"""A request in the form of OpenAI's chat completions, and the answers to it in the same form.

Only what is done here is a field. What would change an answer and is not done is refused by name.
"""

import hashlib
import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from tpu_experiments.config.task_schema import ServeTaskConfig
from tpu_experiments.data.reading.names import ROLES
from tpu_experiments.data.tokens.chat import Messages

MAX_TEMPERATURE = 100.0
MAX_ANSWERS = 8
"""Answers to one request."""
OFF: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
}
"""OpenAI's fields that are not done here, with the values that ask for nothing."""
NOTES = ("metadata", "prompt_cache_key", "safety_identifier", "user")
"""OpenAI's fields that change no answer, whatever they say."""


def _without_null(value: Any) -> Any:
    """Return an object without the fields that are null: they ask for nothing."""
    return {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else value


class Fields(BaseModel):
    """An object of a request, whose fields are known and of their type."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        return _without_null(value)


class Part(Fields):
    """A text of a turn in parts."""

    type: Literal["text"]
    text: str


class Turn(Fields):
    """A turn of a conversation."""

    role: str
    content: str | list[Part]

    @field_validator("role")
    @classmethod
    def _known(cls, role: str) -> str:
        if (known := ROLES.get(role.lower())) not in ("system", "user", "assistant"):
            raise ValueError("there is no such role here; use system, user or assistant")
        return known

    @property
    def text(self) -> str:
        """Return the content, its parts joined."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(Fields):
    """How a stream ends."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class ChatRequest(Fields):
    """A request for answers to a conversation."""

    model: str | None = None
    messages: list[Turn] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = Field(default=None, ge=0, le=MAX_TEMPERATURE, allow_inf_nan=False)
    top_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    n: int = Field(default=1, ge=1, le=MAX_ANSWERS)
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list), Field(max_length=4)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @model_validator(mode="before")
    @classmethod
    def _asked(cls, value: Any) -> Any:
        """Leave out what asks for nothing."""
        given = _without_null(value)
        if not isinstance(given, dict):
            return given
        return {name: one for name, one in given.items() if name not in NOTES and not _is_off(name, one)}

    @field_validator("messages")
    @classmethod
    def _asks(cls, turns: list[Turn]) -> list[Turn]:
        if turns[-1].role != "user":
            raise ValueError("the last turn must be the user's")
        return turns

    def conversation(self, task: ServeTaskConfig) -> Messages:
        """Return the turns: with `task.system` if there is no system text, and without a system text that is empty."""
        turns = tuple((turn.role, turn.text) for turn in self.messages)
        if turns[0][0] == "system" and not turns[0][1].strip():
            return turns[1:]
        if task.system is not None and turns[0][0] != "system":
            return (("system", task.system), *turns)
        return turns

    def draw(self, index: int) -> int | None:
        """Return the number that determines answer `index` of a request with a seed.

        It is at least 2**63; requests without a seed count from 0.
        """
        if self.seed is None:
            return None
        digest = hashlib.blake2b(f"{self.seed}:{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") | 2**63


def _is_off(name: str, value: Any) -> bool:
    """Return whether a field that is not done here asks for nothing; 0 is no False, nor 1 True."""
    return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in OFF.get(name, ()))


class Replies:
    """Fields of the answers to one request."""

    def __init__(self, model: str) -> None:
        self._own = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, texts: list[str], *, reasons: list[str], usage: Mapping[str, int]) -> dict[str, Any]:
        """Return the answers to a request without `stream`."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": reason,
            }
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return {**self._own, "object": "chat.completion", "choices": choices, "usage": dict(usage)}

    def piece(self, text: str, *, index: int) -> dict[str, Any]:
        """Return an event with more text."""
        return self._event([{"index": index, "delta": {"role": "assistant", "content": text}, "finish_reason": None}])

    def last(self, *, index: int, reason: str) -> dict[str, Any]:
        """Return the event after the text of an answer."""
        return self._event([{"index": index, "delta": {}, "finish_reason": reason}])

    def usage(self, usage: Mapping[str, int]) -> dict[str, Any]:
        """Return the event after all answers."""
        return self._event([]) | {"usage": dict(usage)}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._own, "object": "chat.completion.chunk", "choices": choices}
