"""Conversion of raw rows to Documents by `data.<name>.format`.

Conversion runs in worker processes; recognition.py finds the format (`auto`) from the first rows.

text               field `text`
messages           field `messages` or `conversations` (or `data`), a list of role and content or of from and value
alternating        field `data`, a list of strings, user first
question_answer    `question`, `answer`; with the columns of the UK-law recipe its chain-of-thought answer
instruction        `instruction`, `input` or `context`, `output` or `response`
prompt_completion  `prompt` and `completion`, each a string or a list of turns
llama2             field `text` with [INST] marks
human_assistant    field `text` with ### Human: and ### Assistant: marks
explicit_prompt, implicit_prompt, unpaired   preference pairs, and single answers with a label (pairs.py)

Beside the fields of its format a conversation is read with the row's system text, earlier turns, tools and reasoning
(names.py). A field that changes the meaning and cannot be kept refuses the row. All others are named in
`Document.unread`.
"""

import json
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from tpu_experiments.config.data_schema import FORMATS_OF_KIND
from tpu_experiments.config.errors import suggest
from tpu_experiments.data.documents import SAME_ANSWERS, Document, Refused, SourceSpec
from tpu_experiments.data.reading.fields import (
    BadRow,
    Fields,
    Record,
    encodable,
    is_empty,
    list_from_json,
    names_of,
)
from tpu_experiments.data.reading.locations import JSON_SUFFIXES, suffixes_of
from tpu_experiments.data.reading.marked_texts import turns_of_human_assistant, turns_of_llama2
from tpu_experiments.data.reading.names import ROLES, meaning_in_row, normal
from tpu_experiments.data.reading.pairs import (
    CHOSEN,
    COMPLETION,
    FIELDS_OF_PAIRS,
    OPTIONAL_OF_PAIRS,
    PROMPT,
    REJECTED,
    column_of,
    empty_answer,
    label_of,
    margin_of,
    scores_of,
    turns_of_pair,
    turns_of_single,
)
from tpu_experiments.data.reading.raw_rows import RawRow, not_utf8
from tpu_experiments.data.reading.strict_objects import StrictDecoder
from tpu_experiments.data.reading.tools import tools_of
from tpu_experiments.data.reading.turns import Turn, pairs_of, reasoning_of, turn_of, with_calls_joined

FIELDS_OF_FORMAT: dict[str, tuple[tuple[str, ...], ...]] = {
    "text": (("text",),),
    "messages": (("messages", "conversations"),),
    "alternating": (("data",),),
    "question_answer": (("question",), ("answer",)),
    "instruction": (("instruction",), ("output", "response")),
    "prompt_completion": (("prompt",), ("completion",)),
    "llama2": (("text",),),
    "human_assistant": (("text",),),
    **FIELDS_OF_PAIRS,
}
"""Required fields of each format; of alternative names, one is enough."""
RECIPE = ("topic", "difficulty", "reasoning", "case_citation")
"""Columns of the UK-law recipe beside question and answer; a row with two of them has its answer in sections."""
ABOUT = ("input", "context")
"""Fields of what a question or an instruction is about."""
PLACES = re.compile(r"\{instruction\}|\{input\}")
"""Places of the two in `asked_as`."""
OPTIONAL_FIELDS: dict[str, tuple[str, ...]] = {
    "question_answer": (*RECIPE, *ABOUT),
    "instruction": ABOUT,
    **dict.fromkeys(FIELDS_OF_PAIRS, OPTIONAL_OF_PAIRS),
}
FIELDS_OF_CHATS = ("system", "history", "tools", "reasoning")
"""Names under which `fields` of the config gives what every conversation may have beside its format's fields."""
REFERENCE = "answer"
"""Field of a row with the right answer to its question, where the model writes the answers itself; rewards see it."""
WITH_HISTORY = ("question_answer", "instruction", "prompt_completion")
"""Formats of one question and one answer, beside which a row may have earlier turns and the answer's reasoning."""

MEDIA_OF_TEXTS = ("image", "images", "audio", "audios", "video", "videos")
"""Fields beside a plain text that are refused; addresses of pictures are of its page, and only listed."""

_DECODER = StrictDecoder()


def document_of(row: RawRow, *, spec: SourceSpec, is_learnt: bool = True) -> Document | Refused:
    """Convert a row to a Document of `spec.format`, which must not be `auto`; a bad row is a Refused.

    Turns after the last answer are dropped and told as unread. A conversation without an answer, and blank text, are
    refused without counting as bad rows.

    Args:
        is_learnt: False keeps all turns of a conversation, and one without an answer.
    """
    fields = own_fields(row)
    if isinstance(fields, Refused):
        return fields
    try:
        left_out = _exclusion_reason(fields, spec)
        if left_out:
            return Refused("not_kept", row.place, left_out, is_bad_row=False)
        record = Record(fields, renamed=spec.fields)
        _require_known_meaning(record, spec)
        identity = _identity(record) or f"{row.file}:{row.number}"
        group = _group(record, spec)
        if spec.format == "text":
            text = _string(record, "text", spec=spec)
            if not text.strip():
                return Refused("empty", row.place, "has no text.", is_bad_row=False)
            label = _label(record, spec)
            unread = _unread(record, spec)
            return Document(identity, text=text, place=row.place, group=group, label=label, unread=unread)
        inner: set[str] = set()
        if spec.format == "unpaired":
            turns, tools = _single(record, spec, unread=inner)
            label = "true" if label_of(record, spec=spec) else "false"
            single = _chat(turns, tools, identity=identity, place=row.place)
            return replace(single, group=group, label=label, unread=_unread(record, spec, inner))
        if spec.kind == "preference":
            (chosen, rejected), tools = _pair(record, spec, unread=inner)
            scores, margin = scores_of(record), margin_of(record, spec=spec) if spec.reads_margin else None
            pair = _chat(chosen, tools, identity=identity, place=row.place)
            other = _chat(rejected, tools, identity=identity, place=row.place)
            unread = _unread(record, spec, inner)
            return replace(pair, group=group, rejected=other, scores=scores, margin=margin, unread=unread)
        turns, tools = _conversation(record, spec, unread=inner)
        if not spec.needs_answers:
            turns = _with_reference(record, turns)
        answered = _answered(turns) if is_learnt else turns
        if not answered:
            return Refused("no_answer", row.place, "has no assistant turn to learn from.", is_bad_row=False)
        if len(answered) < len(turns):
            inner.add("turns after the last answer")
        document = _chat(answered, tools, identity=identity, place=row.place)
        return replace(document, group=group, unread=_unread(record, spec, inner))
    except BadRow as error:
        message = str(error).encode(errors="backslashreplace").decode()  # it may quote lone surrogates
        return Refused(error.reason, row.place, message)


def _chat(turns: list[Turn], tools: list[Any], *, identity: str, place: str) -> Document:
    """Return a conversation of these turns."""
    extras = tuple(turn.extra(number=number) for number, turn in enumerate(turns, start=1))
    return Document(
        identity,
        messages=tuple((turn.role, turn.content) for turn in turns),
        place=place,
        context=tuple(number for number, turn in enumerate(turns) if turn.is_context),
        extras=extras if any(extras) else (),
        tools=encodable(json.dumps(tools, ensure_ascii=False), name="tools") if tools else "",
    )


def _unread(record: Record, spec: SourceSpec, inner: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names of all fields that were not read, those that the config names aside."""
    named = (*spec.keep, spec.group_field, spec.label_field)
    record.mark(*(name for name in named if name is not None))
    return tuple(sorted({*record.unread, *inner}))


def field_of(row: RawRow, name: str) -> tuple[str | None, list[str]]:
    """Return a field's value as text, None if missing, and the names of all fields.

    A value that is not text is returned as JSON.
    """
    fields = own_fields(row)
    if isinstance(fields, Refused) or name not in fields:
        return None, [] if isinstance(fields, Refused) else list(fields)
    value = fields[name]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), list(fields)


def own_fields(row: RawRow) -> dict[str, Any] | Refused:
    """Return the row's fields by the file's names; in tables without the null members of nested values."""
    if not isinstance(row.data, dict):
        return _parsed(row.data, place=row.place)
    if suffixes_of(row.file)[0] in JSON_SUFFIXES:
        return row.data
    return {name: _without_nulls(value) for name, value in row.data.items()}


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


def _identity(record: Record) -> str:
    """Return the row's id, which names a document in kept files; it is not learnt, and so listed as not read."""
    found = record.peek("id")
    return encodable(str(found), name="id") if isinstance(found, str | int | float) else ""


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


def _require_known_meaning(record: Record, spec: SourceSpec) -> None:
    """Raise for a field that changes what the row means and cannot be kept."""
    names, is_chat = list(record.names()), spec.kind != "text"
    letters = [name for name in names if name in ("A", "B", "C", "D")]
    for name in names:
        meaning, value = meaning_in_row(name), record.fields[name]
        if meaning is None and name not in letters:
            continue
        unread = f"or train without the field: \"+data.{spec.name}.fields.{name}=''\"."
        if meaning == "medium" and value is not False and (is_chat or normal(name) in MEDIA_OF_TEXTS):
            raise BadRow("not_text", f"has a value in {name!r}, and only text is trained on; remove the row, {unread}")
        if is_chat and (meaning == "choices" or (name in letters and len(letters) > 1)):
            raise BadRow(
                "choices",
                f"has choices of a question in {name!r}, which no format reads; write them into the question, {unread}",
            )
        if is_chat and meaning == "template":
            raise BadRow(
                "template_settings",
                f"has settings of the chat template in {name!r}, which are not handed to it; remove them, {unread}",
            )
        if spec.kind == "chat" and meaning == "preference" and isinstance(value, bool) and name not in spec.keep:
            raise BadRow(
                "preference",
                f"has a {name} that says whether its answer is a good one; data.{spec.name}.kind=preference with "
                f"objective=kto learns from both; data.{spec.name}.keep.{name}=[true] reads the good ones.",
            )


def _group(record: Record, spec: SourceSpec) -> str | None:
    """Return the value of the `split_by` field as JSON."""
    if spec.group_field is None:
        return None
    value = record.fields.get(spec.group_field)
    if value is None or isinstance(value, dict | list):
        held = "nothing" if value is None else type(value).__name__
        raise BadRow(
            "no_group",
            f"has {held} in the field {spec.group_field!r} that data.{spec.name}.split_by names; mend the row, or use "
            f"split_by=first_turn. {suggest(spec.group_field, record.fields)}",
        )
    return json.dumps(value)


def _label(record: Record, spec: SourceSpec) -> str | None:
    """Return the row's label as text: a string as it is, an integer in decimal, a boolean as in JSON."""
    name = spec.label_field
    if name is None:
        return None
    key, value = f"data.{spec.name}.label_field", record.fields.get(name)
    if name not in record.fields:
        hint = suggest(name, record.fields)
        raise BadRow("no_label", f"has no field {name!r}, which {key} names; mend the row. {hint}")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str) and value.strip():
        return encodable(value, name=name)
    if value is None or value == "":
        raise BadRow("no_label", f"has no label: its {name} is {json.dumps(value)}; label or remove the row.")
    kind = (
        f"the number {value}" if isinstance(value, float) else "blank" if isinstance(value, str) else "no single value"
    )
    raise BadRow("bad_label", f"has a label that is {kind} ({name}); a label is a string or an integer; mend the row.")


def _conversation(record: Record, spec: SourceSpec, *, unread: set[str]) -> tuple[list[Turn], list[Any]]:
    """Return a row's turns and the tools that it offers.

    Args:
        unread: gets the names of fields inside turns that were not read.
    """
    turns = _TURNS_OF[spec.format](record, spec, unread)
    if spec.format in WITH_HISTORY:
        answer = turns[-1] if turns and turns[-1].role == "assistant" else None
        if answer is not None and not answer.reasoning:
            answer.reasoning = reasoning_of(record, where="the row")
        turns = _with_history(record, turns, spec=spec, unread=unread)
    _add_system(record, turns, spec=spec)
    return turns, _tools(record, turns)


def _pair(record: Record, spec: SourceSpec, *, unread: set[str]) -> tuple[list[list[Turn]], list[Any]]:
    """Return the turns of the chosen and of the rejected conversation, and the tools that the row offers.

    Of the answers only the last is learnt. Turns after it are dropped, as in conversations.

    Raises:
        BadRow: an answer is empty, both are the same, or a turn of the prompt is not there.
    """
    prompt, *answers = turns_of_pair(record, spec=spec, unread=unread)
    if spec.format == "explicit_prompt":
        prompt = _with_history(record, prompt, spec=spec, unread=unread)
    tools = _offered(record, prompt, spec=spec)
    prompt = [_set_aside(turn, is_context=turn.role == "assistant") for turn in prompt]  # once for both
    sides = [
        _ended(prompt, answer, name=column_of(record, names), unread=unread)
        for names, answer in zip((CHOSEN, REJECTED), answers, strict=True)
    ]
    if sides[0] == sides[1]:
        raise BadRow("same_answers", SAME_ANSWERS)
    return sides, tools


def _single(record: Record, spec: SourceSpec, *, unread: set[str]) -> tuple[list[Turn], list[Any]]:
    """Return the turns of a prompt and its only answer, the last of which is learnt, and the tools of the row."""
    prompt, answer = turns_of_single(record, spec=spec, unread=unread)
    prompt = _with_history(record, prompt, spec=spec, unread=unread)
    tools = _offered(record, prompt, spec=spec)
    return _ended(prompt, answer, name=column_of(record, COMPLETION, PROMPT), unread=unread), tools


def _offered(record: Record, prompt: list[Turn], *, spec: SourceSpec) -> list[Any]:
    """Return the tools of a row with answers, whose prompt gets the row's system text and must ask something."""
    _add_system(record, prompt, spec=spec)
    tools = _tools(record, prompt)
    if not any(turn.role in ("user", "tool") for turn in prompt):
        raise BadRow("no_prompt", "has no prompt, a turn of the user that an answer follows; mend or remove the row.")
    return tools


def _ended(prompt: list[Turn], answer: list[Turn], *, name: str, unread: set[str]) -> list[Turn]:
    """Return the turns up to the answer's last one by the assistant, the only one that is learnt.

    Args:
        unread: is told of turns behind that one.
    """
    whole = len(answer)
    while answer and answer[-1].role != "assistant":
        answer = answer[:-1]
    if answer and len(answer) < whole:
        unread.add(f"{name}[] after its last answer")
    last = answer[-1] if answer else Turn("assistant", "")
    if not (last.content.strip() or last.calls or last.reasoning):
        raise empty_answer(name)
    turns = [*prompt, *answer]
    before = [_set_aside(turn, is_context=turn.role == "assistant") for turn in turns[:-1]]
    return [*before, _set_aside(last, is_context=False)]


def _set_aside(turn: Turn, *, is_context: bool) -> Turn:
    """Return the turn itself where it is marked so: most are, and a copy takes 4 us."""
    return turn if turn.is_context == is_context else replace(turn, is_context=is_context)


def _with_history(record: Record, turns: list[Turn], *, spec: SourceSpec, unread: set[str]) -> list[Turn]:
    """Return a row's turns with its earlier turns before them, behind the system turn."""
    found = record.find_all("history", is_meant=lambda name: meaning_in_row(name) == "history")
    if found is None or is_empty(found[1]):
        return turns
    earlier = pairs_of(found[1], unread=unread, path=found[0])
    for turn in earlier if spec.format == "prompt_completion" else []:  # where the loss covers the completion
        turn.is_context = turn.role == "assistant"
    place = 1 if turns and turns[0].role == "system" else 0
    return [*turns[:place], *earlier, *turns[place:]]


def _add_system(record: Record, turns: list[Turn], *, spec: SourceSpec) -> None:
    """Put the row's system text in front of its turns.

    LLaMA-Factory and axolotl drop it without a word where the turns begin with another one; here such a row is refused.
    """
    found = record.find_all("system", is_meant=lambda name: meaning_in_row(name) == "system")
    if found is None or is_empty(found[1]):
        return
    own, text = found
    if not isinstance(text, str):
        raise _wrong_type(own, text, wanted="a string", spec=spec)
    text = encodable(text, name=own)
    if not turns or turns[0].role != "system":
        turns.insert(0, Turn("system", text))
    elif not turns[0].content.strip():
        turns[0].content = text
    elif turns[0].content.strip() != text.strip():
        raise BadRow(
            "two_systems",
            f"has a system text in {own!r} and another one in turn 1; keep one of them, or train without the first: "
            f"\"+data.{spec.name}.fields.system=''\".",
        )


def _tools(record: Record, turns: list[Turn]) -> list[Any]:
    """Return the tools of the row, or else those of its system turns."""
    found = record.find_all("tools", is_meant=lambda name: meaning_in_row(name) == "tools")
    tools = [] if found is None or not turns else tools_of(found[1])
    told = [tool for turn in turns for tool in turn.tools]
    if tools and told and tools != told:
        raise BadRow("bad_tools", "has tools in its row and others in a system turn; keep one of the two.")
    return tools or told


def _with_reference(record: Record, turns: list[Turn]) -> list[Turn]:
    """Return the turns with the row's field `answer`, a text or a number, behind a question at their end."""
    answer = record.peek(REFERENCE)
    is_given = isinstance(answer, str | int | float) and not isinstance(answer, bool) and bool(str(answer).strip())
    if not turns or turns[-1].role == "assistant" or not is_given:
        return turns
    record.find(REFERENCE)  # which marks it as read
    return [*turns, Turn("assistant", encodable(str(answer), name=REFERENCE))]


def _answered(turns: list[Turn]) -> list[Turn]:
    """Return the turns up to the last trainable assistant turn that has text, reasoning or calls a tool."""
    answers = [
        number
        for number, turn in enumerate(turns, start=1)
        if turn.role == "assistant" and (turn.content.strip() or turn.calls or turn.reasoning) and not turn.is_context
    ]
    return turns[: answers[-1]] if answers else []


def _messages(record: Record, spec: SourceSpec, unread: set[str]) -> list[Turn]:
    names = FIELDS_OF_FORMAT["messages"][0]
    if is_list_of(list_from_json(record.peek("data")), dict):
        names = (*names, "data")
    name, given = _required(record, names, spec=spec)
    turns = list_from_json(given)
    if not isinstance(turns, list):
        raise _wrong_type(name, given, wanted="a list of turns or its JSON", spec=spec)
    _require_users_masked(record)
    return with_calls_joined(
        [turn_of(turn, number=number, unread=unread, path=f"{name}[]") for number, turn in enumerate(turns, start=1)]
    )


def _require_users_masked(record: Record) -> None:
    """Read `mask: User` of NeMo's chats, which says what is so; raise where it masks others."""
    masked = record.fields.get("mask")
    if not isinstance(masked, str) or is_empty(masked):
        return
    if ROLES.get(masked.strip().lower()) != "user":
        raise BadRow(
            "bad_mark",
            f"has mask: {masked[:40]!r}, and what is learnt is the assistant's turns; mend or remove the row.",
        )
    record.mark("mask")


def _prompt_completion(record: Record, spec: SourceSpec, unread: set[str]) -> list[Turn]:
    turns: list[Turn] = []
    for field, role in (("prompt", "user"), ("completion", "assistant")):
        if field == "completion" and not spec.needs_answers and record.peek(field) is None:
            continue
        name, given = _required(record, (field,), spec=spec)
        value = list_from_json(given) if is_turns(list_from_json(given)) else given
        if isinstance(value, str):
            found = [Turn(role, encodable(value, name=name))]
        elif isinstance(value, list):
            first = len(turns) + 1
            found = [
                turn_of(turn, number=number, unread=unread, path=f"{name}[]")
                for number, turn in enumerate(value, start=first)
            ]
        else:
            raise _wrong_type(name, value, wanted="a string or a list of turns", spec=spec)
        for turn in found if field == "prompt" else []:
            turn.is_context = turn.role == "assistant"
        turns += with_calls_joined(found)
    return turns


def is_list_of(value: Any, kind: type) -> bool:
    """Return whether a value is a list with items, all of this type."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)


def is_turns(value: Any) -> bool:
    """Return whether a value is a list of objects with roles."""
    return is_list_of(value, dict) and all("role" in item or "from" in item for item in value)


def _alternating(record: Record, spec: SourceSpec, unread: set[str]) -> list[Turn]:
    name, given = _required(record, ("data",), spec=spec)
    turns = list_from_json(given)
    if turns != [] and not is_list_of(turns, str):
        raise _wrong_type(name, given, wanted="a list of strings, user first", spec=spec)
    return [
        Turn(("user", "assistant")[index % 2], encodable(turn, name=f"turn {index + 1}"))
        for index, turn in enumerate(turns)
    ]


def _question_answer(record: Record, spec: SourceSpec, unread: set[str]) -> list[Turn]:
    question = _string(record, "question", spec=spec)
    answer = _string(record, "answer", spec=spec)
    if not is_recipe(record.fields, spec):
        return [Turn("user", _asked(question, record, spec=spec)), Turn("assistant", answer)]
    optional = {name: _optional(record, name, spec=spec) for name in RECIPE}
    head = [f"### {key.title()}: {optional[key]}" for key in ("topic", "difficulty") if optional[key]]
    sections = {
        "Reasoning": optional["reasoning"],
        "Answer": answer,
        "Case Citation": optional["case_citation"],
    }
    parts = ["\n".join(head)] if head else []
    parts += [f"### {title}:\n{body}" for title, body in sections.items() if body]
    return [Turn("user", question), Turn("assistant", "\n\n".join(parts))]


def is_recipe(fields: Fields, spec: SourceSpec) -> bool:
    """Return whether a row has two of the UK-law recipe's columns, filled or not."""
    return sum(spec.fields.get(name, name) in fields for name in RECIPE) > 1


def _instruction(record: Record, spec: SourceSpec, unread: set[str]) -> list[Turn]:
    instruction = _string(record, "instruction", spec=spec)
    answer = _string(record, "output", "response", spec=spec)
    return [Turn("user", _instructed(instruction, record, spec=spec)), Turn("assistant", answer)]


def _instructed(instruction: str, record: Record, *, spec: SourceSpec) -> str:
    """Return an instruction as `asked_as` or `asked_alone_as` writes it."""
    given = _optional(record, *ABOUT, spec=spec)
    text = spec.asked_as if given.strip() else spec.asked_alone_as
    if text is None:
        return _asked(instruction, record, spec=spec)
    values = {"{instruction}": instruction, "{input}": given}
    return PLACES.sub(lambda found: values[found[0]], text)


def _asked(question: str, record: Record, *, spec: SourceSpec) -> str:
    """Return a question with what it is about below; without blank lines where one of the two is blank."""
    given = _optional(record, *ABOUT, spec=spec)
    return "\n\n".join(text for text in (question, given) if text.strip())


def _marked(parse: Callable[[str], list[tuple[str, str]]]) -> Callable[[Record, SourceSpec, set[str]], list[Turn]]:
    def turns_of(record: Record, spec: SourceSpec, unread: set[str]) -> list[Turn]:
        try:
            return [Turn(role, content) for role, content in parse(_string(record, "text", spec=spec))]
        except ValueError as error:
            message = f"{error}, as data.{spec.name}.format={spec.format} needs; mend or remove the row."
            raise BadRow("bad_marks", message) from error

    return turns_of


_TURNS_OF: dict[str, Callable[[Record, SourceSpec, set[str]], list[Turn]]] = {
    "messages": _messages,
    "alternating": _alternating,
    "question_answer": _question_answer,
    "instruction": _instruction,
    "prompt_completion": _prompt_completion,
    "llama2": _marked(turns_of_llama2),
    "human_assistant": _marked(turns_of_human_assistant),
}


def _required(record: Record, names: tuple[str, ...], *, spec: SourceSpec) -> tuple[str, Any]:
    """Return the file's name and the value of the first of these fields that the row has."""
    found = record.find(*names)
    if found is None:
        raise BadRow("no_field", _missing_fields(record.fields, names, spec=spec))
    return found


def _missing_fields(fields: Fields, names: tuple[str, ...], *, spec: SourceSpec) -> str:
    own = [spec.fields.get(name, name) for name in names]
    wanted = " or ".join(own)
    lack = f"null in {wanted!r}" if any(name in fields for name in own) else f"no field {wanted!r}"
    fields = {name: value for name, value in fields.items() if name not in spec.fields}
    held = {name for name, value in fields.items() if value is not None}
    fitting = [
        name
        for name, needs in FIELDS_OF_FORMAT.items()
        if name != spec.format and name in FORMATS_OF_KIND[spec.kind] and all(held & set(either) for either in needs)
    ]
    hint = f"try data.{spec.name}.format={fitting[0]}" if fitting else "mend or remove the row"
    needed = f"which data.{spec.name}.format={spec.format} needs"
    return f"has {lack}, {needed}; it has {names_of(fields)}; {hint}."


def _string(record: Record, *names: str, spec: SourceSpec) -> str:
    name, value = _required(record, names, spec=spec)
    if not isinstance(value, str):
        raise _wrong_type(name, value, wanted="a string", spec=spec)
    return encodable(value, name=name)


def _optional(record: Record, *names: str, spec: SourceSpec) -> str:
    return "" if is_empty(record.peek(*names)) else _string(record, *names, spec=spec)


def _wrong_type(own: str, value: Any, *, wanted: str, spec: SourceSpec) -> BadRow:
    kind = type(value).__name__
    needed = f"as data.{spec.name}.format={spec.format} needs"
    return BadRow(
        "wrong_type", f"has {kind} in {own!r}, not {wanted}, {needed}; mend the row or choose another format."
    )
