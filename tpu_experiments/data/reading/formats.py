"""Conversion of raw rows to Documents by `data.<name>.format`, and recognition of the format (`auto`).

Conversion runs in worker processes; the format is recognised from the first rows.

text             field `text`
messages         field `messages` or `conversations` (or `data`), a list of role and content or of from and value
alternating      field `data`, a list of strings, user first
question_answer  the chain-of-thought answer of the UK-law recipe
instruction      `instruction`, `input` or `context`, `output` or `response`
llama2           field `text` with [INST] marks
human_assistant  field `text` with ### Human: and ### Assistant: marks
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from tpu_experiments.config.data_schema import FORMATS_OF_KIND
from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.data.documents import Document, Refused, SourceSpec, no_document
from tpu_experiments.data.reading.locations import suffixes_of
from tpu_experiments.data.reading.raw_rows import RawRow, not_utf8
from tpu_experiments.data.reading.strict_objects import StrictDecoder

Turns = list[tuple[str, str]]

_INST = re.compile(r"(\[/?INST\])")
_SYSTEM = re.compile(r"\s*<<SYS>>(.*?)<</SYS>>(.*)", re.DOTALL)
_SEQUENCE_MARKS = re.compile(r"^(?:\s|</?s>)+|(?:\s|</?s>)+$")
_SPEAKER = re.compile(r"###\s?(Human|Assistant):")
_ROLE_OF_SPEAKER = {"Human": "user", "Assistant": "assistant"}


def turns_of_llama2(text: str) -> Turns:
    """Parse `<s>[INST] user [/INST] assistant </s>`, repeated, into turns.

    `<<SYS>>system<</SYS>>` may begin a user turn. The literal <s> and </s> around the turns are dropped, since the
    tokenizer writes its own. A text that ends inside an instruction ends with a user turn.

    Raises:
        ValueError: the marks are not in that order.
    """
    before, *parts = _INST.split(text)
    if _without_end(before):
        raise ValueError(f"has text before the first [INST]: {_without_end(before)[:40]!r}")
    if not parts:
        raise ValueError("has no [INST] in its text")
    marks, pieces = parts[::2], parts[1::2]
    turns: Turns = []
    for number, (mark, piece) in enumerate(zip(marks, pieces, strict=True)):
        wanted = ("[INST]", "[/INST]")[number % 2]
        if mark != wanted:
            raise ValueError(f"has {mark} where {wanted} is due, after {number} marks")
        turns += _instruction_turns(piece) if mark == "[INST]" else [("assistant", _without_end(piece))]
    return turns


def _instruction_turns(piece: str) -> Turns:
    found = _SYSTEM.match(piece)
    if found is None:
        return [("user", _without_end(piece))]
    return [("system", found[1].strip()), ("user", _without_end(found[2]))]


def turns_of_human_assistant(text: str) -> Turns:
    """Parse `### Human: user### Assistant: assistant`, repeated, into turns.

    Text before the first mark is a system turn.

    Raises:
        ValueError: there is no mark.
    """
    before, *parts = _SPEAKER.split(text)
    if not parts:
        raise ValueError("has neither ### Human: nor ### Assistant: in its text")
    turns: Turns = [("system", before.strip())] if before.strip() else []
    speakers, pieces = parts[::2], parts[1::2]
    turns += [(_ROLE_OF_SPEAKER[speaker], piece.strip()) for speaker, piece in zip(speakers, pieces, strict=True)]
    return turns


def _without_end(piece: str) -> str:
    return _SEQUENCE_MARKS.sub("", piece)


ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
}

FIELDS_OF_FORMAT: dict[str, tuple[tuple[str, ...], ...]] = {
    "text": (("text",),),
    "messages": (("messages", "conversations"),),
    "alternating": (("data",),),
    "question_answer": (("question",), ("answer",)),
    "instruction": (("instruction",), ("output", "response")),
    "prompt_completion": (("prompt",), ("completion",)),
    "llama2": (("text",),),
    "human_assistant": (("text",),),
}
"""Required fields of each format; of alternative names, one is enough."""
OPTIONAL_FIELDS: dict[str, tuple[str, ...]] = {
    "question_answer": ("topic", "difficulty", "reasoning", "case_citation"),
    "instruction": ("input", "context"),
    "messages": ("tools",),
    "prompt_completion": ("tools",),
}

MARKS = ("train", "training", "weight")
"""Fields of a turn in `messages` that set whether it is trained on: `train: false`, `training: false` or `weight:
0`."""

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
USING_TOOLS = ("messages", "conversations", "prompt", "completion", "tools")
"""Fields whose members a template may read."""
_DECODER = StrictDecoder()
MAX_NAMES_SHOWN = 20

Fields = Mapping[str, Any]


class BadRow(Exception):
    """A row that violates its format: `reason` is a slug for the counts, the message is for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def document_of(row: RawRow, *, spec: SourceSpec) -> Document | Refused:
    """Convert a row to a Document of `spec.format`, which must not be `auto`; a bad row is a Refused.

    Turns after the last answer are dropped. A conversation without an answer, and blank text, are refused without
    counting as bad rows.
    """
    row_fields = _own_fields(row)
    if isinstance(row_fields, Refused):
        return row_fields
    try:
        left_out = _exclusion_reason(row_fields, spec)
        if left_out:
            return Refused("not_kept", row.place, left_out, is_bad_row=False)
        fields = _renamed(row_fields, spec)
        identity = _identity(fields) or f"{row.file}:{row.number}"
        if spec.format == "text":
            text = _string(fields, "text", spec=spec)
            if not text.strip():
                return Refused("empty", row.place, "has no text.", is_bad_row=False)
            label = _label(row_fields, spec)
            return Document(identity, text=text, place=row.place, group=_group(fields, spec), label=label)
        turns = _TURNS_OF[spec.format](fields, spec)
        written = _written_turns(fields, spec)
        extras, tools = _tool_use(written, fields=fields)
        context = _context(written, turns, num_asked=_num_asked(fields, spec))
        turns = _answered(turns, extras=extras, context=context)
        if not turns:
            return Refused("no_answer", row.place, "has no assistant turn to learn from.", is_bad_row=False)
        return Document(
            identity,
            messages=tuple(turns),
            place=row.place,
            group=_group(fields, spec),
            context=tuple(turn for turn in context if turn < len(turns)),
            extras=extras[: len(turns)],
            tools=tools,
        )
    except BadRow as error:
        message = str(error).encode(errors="backslashreplace").decode()  # it may quote lone surrogates
        return Refused(error.reason, row.place, message)


def fields_of(row: RawRow, *, spec: SourceSpec) -> dict[str, Any] | Refused:
    """Return the row's fields by name, renamed by `spec.fields`."""
    fields = _own_fields(row)
    return fields if isinstance(fields, Refused) else _renamed(fields, spec)


def field_of(row: RawRow, name: str) -> tuple[str | None, list[str]]:
    """Return a field's value as text, None if missing, and the names of all fields.

    A value that is not text is returned as JSON.
    """
    fields = _own_fields(row)
    if isinstance(fields, Refused) or name not in fields:
        return None, [] if isinstance(fields, Refused) else list(fields)
    value = fields[name]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), list(fields)


def _own_fields(row: RawRow) -> dict[str, Any] | Refused:
    if isinstance(row.data, dict):
        fields = row.data
        if suffixes_of(row.file)[0] not in JSON_SUFFIXES and any(fields.get(name) for name in USING_TOOLS):
            fields = {name: _without_nulls(value) for name, value in fields.items()}
    else:
        parsed = _parsed(row.data, place=row.place)
        if isinstance(parsed, Refused):
            return parsed
        fields = parsed
    return fields


def _renamed(fields: dict[str, Any], spec: SourceSpec) -> dict[str, Any]:
    if not spec.fields:
        return fields
    renamed = {name: value for name, value in fields.items() if name not in spec.fields}
    return renamed | {name: fields[own] for name, own in spec.fields.items() if own in fields}


def _without_nulls(value: Any) -> Any:
    """Drop null members: in a column of a table every row has the members of all rows."""
    if isinstance(value, dict):
        return {name: _without_nulls(member) for name, member in value.items() if member is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _parsed(line: bytes, *, place: str) -> dict[str, Any] | Refused:
    try:
        fields = _DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        return not_utf8(error, place=place)
    except (ValueError, RecursionError) as error:
        return Refused("not_json", place, f"is not JSON: {error}; mend or remove the line.")
    if not isinstance(fields, dict):
        kind = type(fields).__name__
        return Refused("wrong_type", place, f"is a JSON {kind}, not an object; write one object a line.")
    return fields


def _identity(fields: Fields) -> str:
    given = fields.get("id")
    return _encodable(str(given), name="id") if isinstance(given, str | int | float) else ""


def _exclusion_reason(fields: Fields, spec: SourceSpec) -> str:
    """Return the reason why `keep` leaves the row out, or ""."""
    for name, values in spec.keep.items():
        if name not in fields:
            raise BadRow(
                "no_field",
                f"has no field {name!r}, which data.{spec.name}.keep names; mend the row. {suggest(name, fields)}",
            )
        if not any(_is_value(fields[name], wanted) for wanted in values):
            shown = json.dumps(fields[name], ensure_ascii=False, default=str)[:40]
            return f"has {name}={shown}, which is not in data.{spec.name}.keep.{name}."
    return ""


def _is_value(value: Any, wanted: Any) -> bool:
    """Return whether the values are equal; a table without types holds them as text."""
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted or (isinstance(value, str) and value.lower() == str(wanted).lower())
    return isinstance(value, str | int | float) and str(value) == str(wanted)


def _group(fields: Fields, spec: SourceSpec) -> str | None:
    """Return the value of the `split_by` field as JSON."""
    if spec.group_field is None:
        return None
    value = fields.get(spec.group_field)
    if value is None or isinstance(value, dict | list):
        held = "nothing" if value is None else type(value).__name__
        raise BadRow(
            "no_group",
            f"has {held} in the field {spec.group_field!r} that data.{spec.name}.split_by names; mend the row, or use "
            f"split_by=first_turn. {suggest(spec.group_field, fields)}",
        )
    return json.dumps(value)


def _label(fields: Fields, spec: SourceSpec) -> str | None:
    """Return the row's label as text: a string as it is, an integer in decimal, a boolean as in JSON."""
    name = spec.label_field
    if name is None:
        return None
    key, value = f"data.{spec.name}.label_field", fields.get(name)
    if name not in fields:
        raise BadRow("no_label", f"has no field {name!r}, which {key} names; mend the row. {suggest(name, fields)}")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str) and value.strip():
        return _encodable(value, name=name)
    if value is None or value == "":
        raise BadRow("no_label", f"has no label: its {name} is {json.dumps(value)}; label or remove the row.")
    kind = (
        f"the number {value}" if isinstance(value, float) else "blank" if isinstance(value, str) else "no single value"
    )
    raise BadRow("bad_label", f"has a label that is {kind} ({name}); a label is a string or an integer; mend the row.")


def _answered(turns: Turns, *, extras: tuple[str, ...], context: tuple[int, ...]) -> Turns:
    """Return the turns up to the last trainable assistant turn that has text or calls a tool."""
    answers = [
        number
        for number, (role, content) in enumerate(turns)
        if role == "assistant" and (content.strip() or (extras and extras[number])) and number not in context
    ]
    return turns[: answers[-1] + 1] if answers else []


def _context(written: list[Any], turns: Turns, *, num_asked: int) -> tuple[int, ...]:
    """Return the assistant turns not to train on: marked so in the row, or part of the prompt."""
    return tuple(
        number
        for number, (turn, (role, _)) in enumerate(zip(written, turns, strict=bool(written)))
        if role == "assistant" and (number < num_asked or _is_context(turn, number=number + 1))
    )


def _num_asked(fields: Fields, spec: SourceSpec) -> int:
    """Return the number of prompt turns, where a row has the prompt apart from the completion."""
    prompt = fields["prompt"] if spec.format == "prompt_completion" else []
    return len(prompt) if isinstance(prompt, list) else 1


def _is_context(turn: Fields, *, number: int) -> bool:
    """Return whether a turn says `train: false`, or equally `training: false` or `weight: 0`."""
    marks = {name: turn[name] for name in MARKS if turn.get(name) is not None}
    for name, value in marks.items():
        wanted = (0, 1) if name == "weight" else (False, True)
        if isinstance(value, bool) != (name != "weight") or value not in wanted:
            shown = json.dumps(value, default=str)[:40]
            raise BadRow(
                "bad_mark",
                f"has {name}: {shown} in turn {number}; an answer is learnt ({name}: {json.dumps(wanted[1])}) or only "
                f"read ({name}: {json.dumps(wanted[0])}); mend the row.",
            )
    if len(set(map(bool, marks.values()))) > 1:
        raise BadRow("bad_mark", f"says both that turn {number} is learnt and that it is not, {marks}; mend the row.")
    return not all(marks.values())


def _messages(fields: Fields, spec: SourceSpec) -> Turns:
    names = FIELDS_OF_FORMAT["messages"][0]
    if _is_list_of(fields.get("data"), dict):
        names = (*names, "data")
    name, turns = _required(fields, names, spec=spec)
    if not isinstance(turns, list):
        raise _wrong_type(name, turns, wanted="a list of turns", spec=spec)
    return [_turn(turn, number=number) for number, turn in enumerate(turns, start=1)]


def _prompt_completion(fields: Fields, spec: SourceSpec) -> Turns:
    if isinstance(fields.get("label"), bool) and "label" not in spec.keep:
        raise BadRow(
            "preference",
            "has a label that says whether its completion is a good one, and training on preferences is not there yet; "
            f"data.{spec.name}.keep.label=[true] reads the good ones.",
        )
    found: Turns = []
    for name, role in (("prompt", "user"), ("completion", "assistant")):
        _, value = _required(fields, (name,), spec=spec)
        if isinstance(value, str):
            found.append((role, _encodable(value, name=name)))
        elif isinstance(value, list):
            found += [_turn(turn, number=number) for number, turn in enumerate(value, start=len(found) + 1)]
        else:
            raise _wrong_type(name, value, wanted="a string or a list of turns", spec=spec)
    return found


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)


def _turn(turn: Any, *, number: int) -> tuple[str, str]:
    fields = turn if isinstance(turn, dict) else {}
    role = fields.get("role") or fields.get("from")
    content = fields.get("content") if fields.get("content") is not None else fields.get("value")
    if content is None and fields.get("tool_calls"):
        content = ""
    if isinstance(content, list):
        content = "".join(_part(part, number=number) for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        held = ", ".join(f"{name} ({type(value).__name__})" for name, value in fields.items())
        raise BadRow(
            "wrong_type",
            f"has no role and content (or from and value) of type str in turn {number}; it has "
            f"{held or type(turn).__name__}; mend or remove the row.",
        )
    if role.lower() not in ROLES:
        raise BadRow("bad_role", f"has the role {role!r} in turn {number}. {suggest(role, ROLES)}")
    return ROLES[role.lower()], _encodable(content, name=f"turn {number}")


def _part(part: Any, *, number: int) -> str:
    """Return the text of a content part, `{"type": "text", "text": ...}`."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise BadRow(
            "not_text", f"has a part of type {kind!r} in turn {number}; only text is trained on; remove the row."
        )
    return str(part["text"])


def _written_turns(fields: Fields, spec: SourceSpec) -> list[Any]:
    """Return the row's turn objects, one per turn; empty for formats without them."""
    if spec.format == "messages":
        names = (*FIELDS_OF_FORMAT["messages"][0], "data")
        return list(next(fields[name] for name in names if fields.get(name) is not None))
    if spec.format == "prompt_completion":
        values = (fields["prompt"], fields["completion"])
        return [turn for value in values for turn in (value if isinstance(value, list) else [{}])]
    return []


def _tool_use(turns: list[Any], *, fields: Fields) -> tuple[tuple[str, ...], str]:
    """Return `Document.extras` and `Document.tools`."""
    extras = tuple(_extra(turn, number=number) for number, turn in enumerate(turns, start=1))
    tools = _tools(fields.get("tools")) if turns else ""
    return (extras if any(extras) else ()), tools


def _extra(turn: Fields, *, number: int) -> str:
    """Return the JSON of an assistant's calls, or of the call that a tool's turn answers; "" otherwise."""
    role = ROLES.get(str(turn.get("role") or turn.get("from")).lower())
    extra: dict[str, Any] = {}
    if role == "assistant" and turn.get("tool_calls"):
        calls = _from_json(turn["tool_calls"])
        if not isinstance(calls, list):
            raise BadRow("bad_call", f"has tool_calls in turn {number} that are no list; mend or remove the row.")
        extra["tool_calls"] = [_call(call, number=number) for call in calls]
    if role == "tool":
        extra = {name: turn[name] for name in ("name", "tool_call_id") if isinstance(turn.get(name), str)}
    if not extra and role != "tool":
        return ""
    return _encodable(json.dumps(extra, ensure_ascii=False), name=f"turn {number}")


def _call(call: Any, *, number: int) -> dict[str, Any]:
    """Normalise a call for chat templates: arguments as an object, not as JSON as in OpenAI's API."""
    given = call if isinstance(call, dict) else {}
    function = given.get("function") if given.get("function") is not None else given
    function = function if isinstance(function, dict) else {}
    name, arguments = function.get("name"), _from_json(function.get("arguments"))
    if not isinstance(name, str) or not name or not isinstance(arguments, dict | None):
        raise BadRow(
            "bad_call",
            f"has a call of a tool in turn {number} without a function's name, or with arguments that are no object; "
            "mend or remove the row.",
        )
    called = {"type": "function", "function": {"name": name, "arguments": arguments or {}}}
    return called | ({"id": given["id"]} if isinstance(given.get("id"), str) else {})


def _tools(given: Any) -> str:
    """Return the JSON of the tools that a row offers; a column may contain it as JSON already."""
    tools = _from_json(given)
    if not tools:
        return ""
    if not isinstance(tools, list) or not all(isinstance(_function(tool).get("name"), str) for tool in tools):
        raise BadRow("bad_tools", "has tools that are no list of functions with names; mend or remove the row.")
    return _encodable(json.dumps(tools, ensure_ascii=False), name="tools")


def _function(tool: Any) -> Fields:
    found = tool.get("function", tool) if isinstance(tool, dict) else {}
    return found if isinstance(found, dict) else {}


def _from_json(value: Any) -> Any:
    """Parse a text as JSON; return the text itself if it is none, and any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        return value


def _alternating(fields: Fields, spec: SourceSpec) -> Turns:
    name, turns = _required(fields, ("data",), spec=spec)
    if turns != [] and not _is_list_of(turns, str):
        raise _wrong_type(name, turns, wanted="a list of strings, user first", spec=spec)
    return [
        (("user", "assistant")[index % 2], _encodable(turn, name=f"turn {index + 1}"))
        for index, turn in enumerate(turns)
    ]


def _question_answer(fields: Fields, spec: SourceSpec) -> Turns:
    question = _string(fields, "question", spec=spec)
    answer = _string(fields, "answer", spec=spec)
    optional = {name: _optional(fields, name, spec=spec) for name in OPTIONAL_FIELDS["question_answer"]}
    head = [f"### {key.title()}: {optional[key]}" for key in ("topic", "difficulty") if optional[key]]
    sections = {
        "Reasoning": optional["reasoning"],
        "Answer": answer,
        "Case Citation": optional["case_citation"],
    }
    parts = ["\n".join(head)] if head else []
    parts += [f"### {title}:\n{body}" for title, body in sections.items() if body]
    return [("user", question), ("assistant", "\n\n".join(parts))]


def _instruction(fields: Fields, spec: SourceSpec) -> Turns:
    instruction = _string(fields, "instruction", spec=spec)
    given = _optional(fields, "input", spec=spec) or _optional(fields, "context", spec=spec)
    answer = _string(fields, "output", "response", spec=spec)
    return [("user", f"{instruction}\n\n{given}" if given else instruction), ("assistant", answer)]


def _marked(parse: Callable[[str], Turns]) -> Callable[[Fields, SourceSpec], Turns]:
    def turns_of(fields: Fields, spec: SourceSpec) -> Turns:
        try:
            return parse(_string(fields, "text", spec=spec))
        except ValueError as error:
            message = f"{error}, as data.{spec.name}.format={spec.format} needs; mend or remove the row."
            raise BadRow("bad_marks", message) from error

    return turns_of


_TURNS_OF: dict[str, Callable[[Fields, SourceSpec], Turns]] = {
    "messages": _messages,
    "alternating": _alternating,
    "question_answer": _question_answer,
    "instruction": _instruction,
    "prompt_completion": _prompt_completion,
    "llama2": _marked(turns_of_llama2),
    "human_assistant": _marked(turns_of_human_assistant),
}


def _required(fields: Fields, names: tuple[str, ...], *, spec: SourceSpec) -> tuple[str, Any]:
    """Return the first of the names that the row has, and its value."""
    for name in names:
        if fields.get(name) is not None:
            return name, fields[name]
    raise BadRow("no_field", _missing_fields(fields, names, spec=spec))


def _missing_fields(fields: Fields, names: tuple[str, ...], *, spec: SourceSpec) -> str:
    wanted = " or ".join(spec.fields.get(name, name) for name in names)
    lack = f"null in {wanted!r}" if any(name in fields for name in names) else f"no field {wanted!r}"
    held = {name for name, value in fields.items() if value is not None}
    fitting = [
        name
        for name, needs in FIELDS_OF_FORMAT.items()
        if name != spec.format and name in FORMATS_OF_KIND[spec.kind] and all(held & set(either) for either in needs)
    ]
    hint = f"try data.{spec.name}.format={fitting[0]}" if fitting else "mend or remove the row"
    needed = f"which data.{spec.name}.format={spec.format} needs"
    return f"has {lack}, {needed}; it has {names_of(fields)}; {hint}."


def names_of(fields: Fields) -> str:
    """List the names of a row's fields for an error message."""
    names = [str(name)[:40] for name in fields]
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return (", ".join(names[:MAX_NAMES_SHOWN]) or "no field") + more


def _string(fields: Fields, *names: str, spec: SourceSpec) -> str:
    name, value = _required(fields, names, spec=spec)
    if not isinstance(value, str):
        raise _wrong_type(name, value, wanted="a string", spec=spec)
    return _encodable(value, name=name)


def _optional(fields: Fields, name: str, *, spec: SourceSpec) -> str:
    return "" if fields.get(name) is None else _string(fields, name, spec=spec)


def _encodable(text: str, *, name: str) -> str:
    """Return the text; raise for half of a UTF-16 pair, which JSON can hold and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        message = f"holds half of a UTF-16 pair ({half}) at character {error.start} of {name}; mend or remove the row."
        raise BadRow("surrogate", message) from error
    return text


def _wrong_type(name: str, value: Any, *, wanted: str, spec: SourceSpec) -> BadRow:
    own, kind = spec.fields.get(name, name), type(value).__name__
    needed = f"as data.{spec.name}.format={spec.format} needs"
    return BadRow(
        "wrong_type", f"has {kind} in {own!r}, not {wanted}, {needed}; mend the row or choose another format."
    )


NUM_ROWS_SEEN = 20
MAX_ROWS_TRIED = 1000


def recognise(rows: Iterable[RawRow | Refused], *, spec: SourceSpec) -> SourceSpec:
    """Return `spec` with the format of the first readable rows; unchanged where it names a format.

    In a table with a single text column, that column is the text. Rows of no format are left to the reader, which
    reports them one by one, unless all are.

    Raises:
        ConfigError: no row, none readable, none of a format of `spec.kind`, rows of several formats, or
            `spec.fields` renames a field that the format does not have.
    """
    if spec.format == "auto":
        spec = _recognised(_first_fields(rows, spec=spec), spec=spec)
    known = {"id", *OPTIONAL_FIELDS.get(spec.format, ())}.union(*FIELDS_OF_FORMAT[spec.format])
    unknown = [name for name in spec.fields if name not in known]
    if unknown:
        raise ConfigError(
            f"data.{spec.name}.fields={spec.fields}; format {spec.format} has no field {unknown[0]!r}. "
            f"{suggest(unknown[0], known)}"
        )
    return spec


def _first_fields(rows: Iterable[RawRow | Refused], *, spec: SourceSpec) -> list[Fields]:
    seen: list[Fields] = []
    refused: Refused | None = None
    for row in islice(rows, MAX_ROWS_TRIED):
        fields = fields_of(row, spec=spec) if isinstance(row, RawRow) else row
        if isinstance(fields, Refused):
            refused = refused or fields
            continue
        seen.append(fields)
        if len(seen) == NUM_ROWS_SEEN:
            break
    if not seen and refused is None:
        raise no_document(spec)
    if not seen and refused is not None:
        raise ConfigError(f"{spec.key}; none of its first rows can be read; {refused.place} {refused.message}")
    return seen


def _recognised(seen: list[Fields], *, spec: SourceSpec) -> SourceSpec:
    _refuse_preferences(seen, spec=spec)
    found = _formats_of(seen, kind=spec.kind)
    if len(found) == 1:
        return replace(spec, format=found[0])
    choices = ", ".join(name for name in FORMATS_OF_KIND[spec.kind] if name != "auto")
    if found:
        raise ConfigError(
            f"data.{spec.name}.format=auto; the first {len(seen)} rows are of several formats, "
            f"{', '.join(found)}; choose one (data.{spec.name}.format= {choices}), or make two sources."
        )
    column = _only_column(seen) if spec.kind == "text" else None
    if column is not None:
        return replace(spec, format="text", fields={**spec.fields, "text": column})
    other = "text" if spec.kind == "chat" else "chat"
    fitting = _formats_of(seen, kind=other)
    if fitting:
        what = {"text": "plain text", "chat": f"conversations ({', '.join(fitting)})"}[other]
        raise ConfigError(
            f"data.{spec.name}.kind={spec.kind}; the rows of {spec.path} are {what}; set data.{spec.name}.kind={other}."
        )
    raise ConfigError(
        f"data.{spec.name}.format=auto; the rows of {spec.path} have the fields {names_of(seen[0])}, which is no known "
        f"format; set data.{spec.name}.format= to one of {choices}, and data.{spec.name}.fields= where its fields have "
        "other names here, such as {text: body}."
    )


def _refuse_preferences(seen: list[Fields], *, spec: SourceSpec) -> None:
    """Raise for rows with a chosen and a rejected answer, unless `spec.fields` picks the chosen one.

    Raises:
        ConfigError: there are such rows, and `spec.fields` does not.
    """
    pair = next((fields for fields in seen if {"chosen", "rejected"} <= fields.keys()), None)
    if pair is None or "chosen" in spec.fields.values():
        return
    chosen, has_prompt = pair["chosen"], pair.get("prompt") is not None
    begins = chosen[0] if isinstance(chosen, list) and chosen and isinstance(chosen[0], dict) else {}
    is_whole = (begins.get("role") or begins.get("from")) not in ("assistant", "gpt") if begins else not has_prompt
    key = "text" if isinstance(chosen, str) and not has_prompt else "messages" if is_whole else "completion"
    kind = "text" if key == "text" else "chat"
    raise ConfigError(
        f"{spec.key}; its rows are preference pairs (chosen and rejected answers), and training on preferences is not "
        f"there yet; 'data.{spec.name}.fields={{{key}: chosen}}' with data.{spec.name}.kind={kind} reads the chosen "
        f"ones, data.{spec.name}.format= another field of the rows."
    )


def _formats_of(seen: list[Fields], *, kind: str) -> list[str]:
    return sorted({found for fields in seen if (found := _format_of(fields, kind=kind)) is not None})


def _format_of(fields: Fields, *, kind: str) -> str | None:
    """Return the format of one row; None if it matches none."""
    text = fields.get("text")
    if kind == "text":
        return "text" if isinstance(text, str) else None
    turns, data = (fields.get("messages") or fields.get("conversations")), fields.get("data")
    if isinstance(turns, list):
        return "messages"
    if isinstance(data, list) and data:
        return "messages" if isinstance(data[0], dict) else "alternating"
    for name in ("question_answer", "instruction"):
        if all(any(isinstance(fields.get(field), str) for field in either) for either in FIELDS_OF_FORMAT[name]):
            return name
    if all(isinstance(fields.get(name), str | list) for name in ("prompt", "completion")):
        return "prompt_completion"
    if isinstance(text, str) and "[INST]" in text:
        return "llama2"
    return "human_assistant" if isinstance(text, str) and "### Human:" in text else None


def _only_column(seen: list[Fields]) -> str | None:
    """Return the only field of every row if it is text, else None."""
    names = {name for fields in seen for name in fields}
    is_text = all(isinstance(value, str) for fields in seen for value in fields.values())
    return names.pop() if len(names) == 1 and is_text else None
