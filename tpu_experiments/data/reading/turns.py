"""Turns of a conversation: role, content, reasoning, calls of tools, and whether an answer is learnt."""

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tpu_experiments.config.errors import suggest
from tpu_experiments.data.documents import REASONING
from tpu_experiments.data.reading.fields import BadRow, Record, encodable, from_json, is_empty
from tpu_experiments.data.reading.names import (
    CALL_ROLES,
    ROLES,
    SETTINGS,
    Mark,
    is_reasoning,
    mark_of,
    meaning_in_turn,
    normal,
)
from tpu_experiments.data.reading.tools import calls_of, tools_of

TEXT_PARTS = ("text", "input_text", "output_text")
CALL_PARTS = ("tool_call", "tool_use", "function_call")
"""Types of content parts that are a call (LLaMA-Factory's v1 format, Anthropic)."""


@dataclass
class Turn:
    """One turn as read."""

    role: str
    content: str
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    beside: dict[str, str] = field(default_factory=dict)
    """Of a tool's turn, `name` and `tool_call_id`."""
    tools: list[Any] = field(default_factory=list)
    """Tools that a system turn offers."""
    is_call: bool = False
    """Whether the turn is nothing but calls, by its role."""
    is_context: bool = False
    """Whether an answer is only read."""

    def extra(self, *, number: int) -> str:
        """Return the JSON of what a template reads beside role and content; "" where there is none."""
        extra: dict[str, Any] = dict(self.beside)
        if self.reasoning:
            extra[REASONING] = self.reasoning
        if self.calls:
            extra["tool_calls"] = self.calls
        if not extra and self.role != "tool":
            return ""
        return encodable(json.dumps(extra, ensure_ascii=False), name=f"turn {number}")


def turn_of(given: Any, *, number: int, unread: set[str], path: str) -> Turn:
    """Read a turn, of role and content or of from and value.

    Args:
        number: of the turn, from 1, for messages.
        unread: gets the names of fields that were not read, after `path`.

    Raises:
        BadRow: it is no turn, or holds what cannot be kept.
    """
    fields = given if isinstance(given, dict) else {}
    if len(fields) == 2:  # most turns; the rest of this function would take ten times as long
        role, content = fields.get("role", fields.get("from")), fields.get("content", fields.get("value"))
        if isinstance(role, str) and role in ROLES and isinstance(content, str):
            return Turn(ROLES[role], encodable(content, name=f"turn {number}"))
    record = Record(fields)
    _require_text_only(record, number=number)
    role, has_calls_as_content = _role(record, number=number)
    turn = Turn(role or "", "")
    if role == "assistant":
        turn.calls = _calls(record, number=number, unread=unread, path=path)
        turn.reasoning = reasoning_of(record, where=f"turn {number}")
    own, content = _content(record, turn, number=number, unread=unread, path=path)
    if content is None and (turn.calls or turn.reasoning):
        content = ""
    if has_calls_as_content and content is not None:
        turn.calls += calls_of(content, number=number, unread=unread, path=f"{path}.{own}")
        content, turn.is_call = "", True
    if role is None or not isinstance(content, str):
        held = ", ".join(f"{name} ({type(value).__name__})" for name, value in fields.items())
        raise BadRow(
            "wrong_type",
            f"has no role and content (or from and value) of type str in turn {number}; it has "
            f"{held or type(given).__name__}; mend or remove the row.",
        )
    turn.content = encodable(content, name=f"turn {number}")
    if role == "tool":
        for name, spellings in (("name", ("name", "tool_name")), ("tool_call_id", ("tool_call_id", "call_id"))):
            found = record.find(*spellings)
            if found is not None and isinstance(found[1], str):
                turn.beside[name] = found[1]
            elif found is not None:
                record.unmark(found[0])
    if role == "system":
        offered = record.find_all("tools", is_meant=lambda name: meaning_in_turn(name) == "tools")
        turn.tools = [] if offered is None else tools_of(offered[1])
    turn.is_context = _is_context(record, role=role, number=number)
    unread.update(f"{path}.{name}" for name in record.unread)
    return turn


def with_calls_joined(turns: list[Turn]) -> list[Turn]:
    """Return the turns with those that are nothing but calls added to the assistant's turn before them.

    Files with a role for calls write a turn for each call, and one for the text before (ms-swift).
    """
    found: list[Turn] = []
    for turn in turns:
        before = found[-1] if found else None
        is_part = turn.is_call and not turn.reasoning and before is not None and before.role == "assistant"
        if is_part and before is not None and before.is_context == turn.is_context:
            before.calls += turn.calls
        else:
            found.append(turn)
    return found


def _role(record: Record, *, number: int) -> tuple[str | None, bool]:
    """Return the role, None where there is no text for it, and whether the content is the JSON of calls.

    Raises:
        BadRow: nobody uses this role.
    """
    found = record.find("role", "from")
    if found is None or not isinstance(found[1], str) or not found[1]:
        return None, False
    name = found[1].strip().lower()
    if name in CALL_ROLES:
        return "assistant", True
    if name not in ROLES:
        raise BadRow("bad_role", f"has the role {found[1]!r} in turn {number}. {suggest(found[1], ROLES)}")
    return ROLES[name], False


def _content(record: Record, turn: Turn, *, number: int, unread: set[str], path: str) -> tuple[str, Any]:
    """Return the content's field and its text, or what is no text unchanged; None where there is none.

    What content parts hold beside text is added to the turn.
    """
    found = record.find("content", "value", "text")
    if found is None:
        return "", None
    own, content = found
    if not isinstance(content, list):
        return own, content
    parts = [_part(part, number=number, unread=unread, path=f"{path}.{own}[]") for part in content]
    ranks = [part.rank for part in parts if part.text.strip() or part.calls]
    if ranks != sorted(ranks):
        raise BadRow(
            "bad_parts",
            f"has content parts in turn {number} that are not in the order of templates: reasoning, text, calls; mend "
            "or remove the row.",
        )
    calls = [call for part in parts for call in part.calls]
    reasoning = "".join(part.text for part in parts if part.rank == _THOUGHT)
    if (reasoning or calls) and turn.role != "assistant":
        raise BadRow(
            "not_text",
            f"has reasoning or calls in turn {number}, which is not the assistant's; mend or remove the row.",
        )
    if reasoning and turn.reasoning not in ("", reasoning):
        raise BadRow(
            "bad_reasoning", f"has reasoning in turn {number} and other reasoning in its parts; keep one of the two."
        )
    turn.reasoning = turn.reasoning or encodable(reasoning, name=f"turn {number}")
    turn.calls += calls
    return own, "".join(part.text for part in parts if part.rank == _TEXT)


_THOUGHT, _TEXT, _CALL = range(3)


class _Part(NamedTuple):
    rank: int
    """`_THOUGHT`, `_TEXT` or `_CALL`, in the order in which templates write them."""
    text: str
    calls: list[dict[str, Any]]


def _part(part: Any, *, number: int, unread: set[str], path: str) -> _Part:
    """Read a content part: `{"type": "text", "text": ...}`, one of reasoning or of a call, or a string."""
    if isinstance(part, str):
        return _Part(_TEXT, part, [])
    record = Record(part if isinstance(part, dict) else {})
    found = record.find("type")
    kind = found[1] if found is not None else None
    if kind in CALL_PARTS:
        value = record.find("value", "tool_call", "function_call")
        if value is None:
            called = {name: each for name, each in record.fields.items() if name != "type"}
            return _Part(_CALL, "", calls_of(called, number=number, unread=unread, path=path))
        unread.update(f"{path}.{name}" for name in record.unread)
        return _Part(_CALL, "", calls_of(value[1], number=number, unread=unread, path=f"{path}.{value[0]}"))
    is_thought = isinstance(kind, str) and is_reasoning(kind)
    if not (is_thought or kind in TEXT_PARTS or (is_empty(kind) and record.fields)):
        what = repr(kind) if kind is not None else repr(type(part).__name__)
        raise BadRow(
            "not_text", f"has a part of type {what} in turn {number}; only text is trained on; remove the row."
        )
    _require_text_only(record, number=number)
    names = ("text", "value", "content")
    value = record.find(*((str(kind), "thinking", "reasoning", *names) if is_thought else names))
    text = value[1] if value is not None else None
    if is_thought and isinstance(text, list):
        text = "".join(_part(each, number=number, unread=unread, path=path).text for each in text)
    if not isinstance(text, str):
        held = ", ".join(f"{name} ({type(value).__name__})" for name, value in record.fields.items())
        raise BadRow(
            "not_text",
            f"has a part without a text of type str in turn {number}; it has {held}; only text is trained on; mend or "
            "remove the row.",
        )
    unread.update(f"{path}.{name}" for name in record.unread)
    return _Part(_THOUGHT if is_thought else _TEXT, text, [])


def _require_text_only(record: Record, *, number: int) -> None:
    """Raise for what changes the meaning of a turn and cannot be kept."""
    for name in record.names():
        meaning = meaning_in_turn(name)
        if meaning == "medium" and record.fields[name] is not False:
            raise BadRow("not_text", f"has {name!r} in turn {number}; only text is trained on; remove the row.")
        if meaning == "refusal":
            raise BadRow("refusal", f"has a refusal in turn {number} beside its content; mend or remove the row.")
        if meaning == "detail":
            raise BadRow(
                "bad_mark",
                f"has {name!r} in turn {number}: an answer is learnt or only read as a whole; mend or remove the row.",
            )
        if normal(name) == "channel" and str(record.fields[name]).lower() not in ("final", "default"):
            shown = str(record.fields[name])[:40]
            raise BadRow(
                "bad_channel",
                f"has channel: {shown!r} in turn {number}, which is no answer; write its content as {REASONING} of the "
                "answer's turn, or remove the row.",
            )


def reasoning_of(record: Record, *, where: str) -> str:
    """Return the reasoning that fields of a turn or row hold, "" without; settings such as `reasoning: on` are none.

    Raises:
        BadRow: it is a list or an object.
    """
    found = record.find_all(
        "reasoning", is_meant=lambda name: is_reasoning(name) and not _is_setting(record.fields[name])
    )
    if found is None or is_empty(found[1]) or _is_setting(found[1]):
        return ""
    own, text = found
    if isinstance(text, list):
        text = "\n".join(text) if all(isinstance(item, str) for item in text) else text
    if not isinstance(text, str):
        raise BadRow(
            "wrong_type",
            f"has {type(text).__name__} in {own!r} of {where}, not a string, as reasoning is; mend or remove the row.",
        )
    return encodable(text, name=f"{own} of {where}")


def _is_setting(value: Any) -> bool:
    return isinstance(value, bool | int | float) or (isinstance(value, str) and value.strip().lower() in SETTINGS)


def _calls(record: Record, *, number: int, unread: set[str], path: str) -> list[dict[str, Any]]:
    """Return an assistant's calls, of `tool_calls` or the old `function_call`.

    Raises:
        BadRow: two fields hold different calls.
    """
    calls: list[dict[str, Any]] = []
    for name in [name for name in record.fields if meaning_in_turn(name) == "calls"]:
        if record.fields[name] in (None, "", [], {}):
            continue
        found = calls_of(record.fields[name], number=number, unread=unread, path=f"{path}.{name}")
        if calls and [call["function"] for call in calls] != [call["function"] for call in found]:
            raise BadRow(
                "bad_call", f"has other calls in {name!r} of turn {number} than beside it; keep one of the two."
            )
        calls = calls or found
        record.mark(name)
    return calls


def _is_context(record: Record, *, role: str, number: int) -> bool:
    """Return whether an answer is only read: `train: false`, `weight: 0`, `masked: true` and their like.

    On other turns, marks that say so are read, since they say what is so; those that want such a turn learnt are not.

    Raises:
        BadRow: a mark on an answer is neither, such as a weight of 0.5, or two of them differ.
    """
    marks = {name: mark for name in record.names() if (mark := mark_of(name)) is not None}
    learnt: dict[str, bool] = {}
    for name, mark in marks.items():
        is_learnt = _is_learnt(record.fields[name], mark)
        if role == "assistant" and is_learnt is None:
            shown = json.dumps(record.fields[name], default=str)[:40]
            yes, no = mark.values
            raise BadRow(
                "bad_mark",
                f"has {name}: {shown} in turn {number}; an answer is learnt ({name}: {yes}) or only read ({name}: "
                f"{no}); mend the row.",
            )
        if role == "assistant" or is_learnt is False:
            record.mark(name)
            learnt[name] = bool(is_learnt)
    if len(set(learnt.values())) > 1:
        given = {name: record.fields[name] for name in learnt}
        raise BadRow("bad_mark", f"says both that turn {number} is learnt and that it is not, {given}; mend the row.")
    return role == "assistant" and not all(learnt.values())


def _is_learnt(value: Any, mark: Mark) -> bool | None:
    """Return what a mark says; None where it says neither."""
    wanted = bool if isinstance(value, bool) else int
    if wanted not in mark.types or not isinstance(value, bool | int | float) or value not in (0, 1):
        return None
    return bool(value) == mark.is_learnt


def pairs_of(given: Any, *, unread: set[str], path: str) -> list[Turn]:
    """Return earlier turns: a list of [user, assistant] pairs, or of turns; either may be JSON text.

    Raises:
        BadRow: it is neither.
    """
    history = from_json(given)
    if not isinstance(history, list):
        raise _no_history(path, history)
    turns: list[Turn] = []
    for item in history:
        if isinstance(item, dict):
            turns.append(turn_of(item, number=len(turns) + 1, unread=unread, path=f"{path}[]"))
        elif isinstance(item, list) and len(item) == 2 and all(isinstance(text, str) for text in item):
            name = f"turn {len(turns) + 1}"
            turns += [Turn("user", encodable(item[0], name=name)), Turn("assistant", encodable(item[1], name=name))]
        else:
            raise _no_history(path, item)
    return turns


def _no_history(path: str, held: Any) -> BadRow:
    return BadRow(
        "wrong_type",
        f"has {type(held).__name__} in {path!r}, not a list of [question, answer] pairs or of turns; mend or "
        "remove the row.",
    )
