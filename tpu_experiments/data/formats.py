"""One row of a source to one Document, by `data.<name>.format`.

`text`: field `text`. `messages`: field `messages` or `conversations`, a list of role and content or
of from and value. `alternating`: field `data`, a list of strings, user first. `question_answer`:
the chain-of-thought answer of the UK-law recipe.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.data.documents import Document, SourceSpec

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}

FIELDS_OF_FORMAT = {
    "text": ("text",),
    "messages": ("messages", "conversations"),
    "alternating": ("data",),
    "question_answer": ("question", "answer"),
}


@dataclass(frozen=True)
class Row:
    """A row as read: its fields, the file it is in, and its number there, counted from 1."""

    fields: dict[str, Any]
    file: str
    unit: str
    """`line` or `row`."""
    number: int

    @property
    def place(self) -> str:
        return f"{self.unit} {self.number} of {self.file}"


def document_of(row: Row, *, spec: SourceSpec) -> Document:
    """The row as a Document; one with no text, or with fewer than two turns, is empty.

    Raises:
        ConfigError: the row lacks a field of the format, or a field is of another type.
    """
    given = row.fields.get("id")
    identity = f"{row.file}:{row.number}" if given is None else str(given)
    if spec.format == "text":
        return Document(identity, text=_string(row, "text", spec=spec))
    return Document(identity, messages=_MESSAGES_OF[spec.format](row, spec))


def _messages(row: Row, spec: SourceSpec) -> tuple[tuple[str, str], ...]:
    field = "messages" if row.fields.get("messages") is not None else "conversations"
    turns = _required(row, field, spec=spec)
    if not isinstance(turns, list):
        raise _wrong_type(row, field, turns, wanted="a list of turns", spec=spec)
    return tuple(_turn(row, turn, number=i + 1, spec=spec) for i, turn in enumerate(turns))


def _turn(row: Row, turn: Any, *, number: int, spec: SourceSpec) -> tuple[str, str]:
    fields = turn if isinstance(turn, dict) else {}
    role = fields.get("role") or fields.get("from")
    content = fields.get("content") if fields.get("content") is not None else fields.get("value")
    if not isinstance(role, str) or not isinstance(content, str):
        held = ", ".join(f"{k} ({type(v).__name__})" for k, v in fields.items())
        raise ConfigError(
            f"{spec.key}; turn {number} in {row.place} has no role and content (or from and value) "
            f"of type str; it has {held or type(turn).__name__}; mend or remove the row."
        )
    if role.lower() not in ROLES:
        raise ConfigError(f"{spec.key}; turn {number} in {row.place} has the role {role!r}. {suggest(role, ROLES)}")
    return ROLES[role.lower()], _encodable(content, row=row, spec=spec)


def _alternating(row: Row, spec: SourceSpec) -> tuple[tuple[str, str], ...]:
    turns = _required(row, "data", spec=spec)
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise _wrong_type(row, "data", turns, wanted="a list of strings, user first", spec=spec)
    paired = turns[: len(turns) // 2 * 2]  # a last turn without an answer is dropped
    return tuple((("user", "assistant")[i % 2], _encodable(turn, row=row, spec=spec)) for i, turn in enumerate(paired))


def _question_answer(row: Row, spec: SourceSpec) -> tuple[tuple[str, str], ...]:
    question = _string(row, "question", spec=spec)
    answer = _string(row, "answer", spec=spec)
    optional = {
        field: _string(row, field, spec=spec) if row.fields.get(field) is not None else ""
        for field in ("topic", "difficulty", "reasoning", "case_citation")
    }
    head = [f"### {key.title()}: {optional[key]}" for key in ("topic", "difficulty") if optional[key]]
    sections = {
        "Reasoning": optional["reasoning"],
        "Answer": answer,
        "Case Citation": optional["case_citation"],
    }
    parts = ["\n".join(head)] if head else []
    parts += [f"### {title}:\n{body}" for title, body in sections.items() if body]
    return (("user", question), ("assistant", "\n\n".join(parts)))


_MESSAGES_OF: dict[str, Callable[[Row, SourceSpec], tuple[tuple[str, str], ...]]] = {
    "messages": _messages,
    "alternating": _alternating,
    "question_answer": _question_answer,
}


def _required(row: Row, field: str, *, spec: SourceSpec) -> Any:
    value = row.fields.get(field)
    if value is not None:
        return value
    wanted = " or ".join(FIELDS_OF_FORMAT["messages"]) if spec.format == "messages" else field
    lack = f"null in {wanted!r}" if field in row.fields else f"no field {wanted!r}"
    fitting = [
        name
        for name, fields in FIELDS_OF_FORMAT.items()
        if name != spec.format and any(row.fields.get(f) is not None for f in fields)
    ]
    hint = f"try data.{spec.name}.format={fitting[0]}" if fitting else "mend or remove the row"
    raise ConfigError(
        f"{spec.key}; {row.place} has {lack}, which data.{spec.name}.format={spec.format} needs; "
        f"it has {', '.join(row.fields) or 'no field'}; {hint}."
    )


def _string(row: Row, field: str, *, spec: SourceSpec) -> str:
    value = _required(row, field, spec=spec)
    if not isinstance(value, str):
        raise _wrong_type(row, field, value, wanted="a string", spec=spec)
    return _encodable(value, row=row, spec=spec)


def _encodable(text: str, *, row: Row, spec: SourceSpec) -> str:
    """The text itself; JSON can write half of a UTF-16 pair, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{spec.key}; {row.place} holds half of a UTF-16 pair "
            f"(\\u{ord(text[error.start]):04x}) at character {error.start}; mend or remove the row."
        ) from error
    return text


def _wrong_type(row: Row, field: str, value: Any, *, wanted: str, spec: SourceSpec) -> ConfigError:
    return ConfigError(
        f"{spec.key}; {field!r} in {row.place} is {type(value).__name__}, not {wanted}, as "
        f"data.{spec.name}.format={spec.format} needs; mend the row or choose another format."
    )
