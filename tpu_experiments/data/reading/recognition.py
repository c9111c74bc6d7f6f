"""Recognition of a source's format (`format: auto`) from its first rows."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from tpu_experiments.config.data_schema import FORMATS_OF_KIND
from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.data.documents import Refused, SourceSpec, no_document
from tpu_experiments.data.reading.fields import Record, list_from_json, names_of
from tpu_experiments.data.reading.formats import (
    FIELDS_OF_CHATS,
    FIELDS_OF_FORMAT,
    OPTIONAL_FIELDS,
    REFERENCE,
    own_fields,
)
from tpu_experiments.data.reading.pairs import format_of_pair
from tpu_experiments.data.reading.raw_rows import RawRow

NUM_ROWS_SEEN = 20
MAX_ROWS_TRIED = 1000
NAMES_SHOWN = 12
FOUND = {"text": "plain text", "chat": "conversations"}


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
    known |= set(FIELDS_OF_CHATS) if spec.kind != "text" else set()
    known |= set() if spec.needs_answers else {REFERENCE}
    unknown = [name for name, own in spec.fields.items() if name not in known and own]
    if unknown:
        raise ConfigError(
            f"data.{spec.name}.fields={spec.fields}; format {spec.format} has no field {unknown[0]!r}. "
            f"{suggest(unknown[0], known)}"
        )
    return spec


def _first_fields(rows: Iterable[RawRow | Refused], *, spec: SourceSpec) -> list[Record]:
    seen: list[Record] = []
    refused: Refused | None = None
    for row in islice(rows, MAX_ROWS_TRIED):
        fields = own_fields(row) if isinstance(row, RawRow) else row
        if isinstance(fields, Refused):
            refused = refused or fields
            continue
        seen.append(Record(fields, renamed=spec.fields))
        if len(seen) == NUM_ROWS_SEEN:
            break
    if not seen and refused is None:
        raise no_document(spec)
    if not seen and refused is not None:
        raise ConfigError(f"{spec.key}; none of its first rows can be read; {refused.place} {refused.message}")
    return seen


def _recognised(seen: list[Record], *, spec: SourceSpec) -> SourceSpec:
    if spec.kind != "preference":
        _refuse_preferences(seen, spec=spec)
    found = _formats_of(seen, kind=spec.kind, needs_answers=spec.needs_answers)
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
    other = "chat" if spec.kind == "text" else "text"
    if spec.kind == "preference":
        raise _no_pairs(seen, spec=spec)
    loose = next((name for record in seen if (name := _format_by_names(record, kind=spec.kind)) is not None), None)
    if loose is not None:  # of other types; the reader names them row by row
        return replace(spec, format=loose)
    fitting = _formats_of(seen, kind=other)
    if fitting:
        what = {"text": "plain text", "chat": f"conversations ({', '.join(fitting)})"}[other]
        raise ConfigError(
            f"data.{spec.name}.kind={spec.kind}; the rows of {spec.path} are {what}; set data.{spec.name}.kind={other}."
        )
    held = names_of(seen[0].fields)
    raise ConfigError(
        f"data.{spec.name}.format=auto; the rows of {spec.path} have the fields {held}, which is no known "
        f"format; set data.{spec.name}.format= to one of {choices}, and data.{spec.name}.fields= where its fields have "
        "other names here, such as {text: body}."
    )


def _no_pairs(seen: list[Record], *, spec: SourceSpec) -> ConfigError:
    """Return the error for rows that are no pairs, with what the first one holds."""
    held = ", ".join(f"{name} ({_shape_of(value)})" for name, value in list(seen[0].fields.items())[:NAMES_SHOWN])
    kinds = [kind for kind in ("chat", "text") if _formats_of(seen, kind=kind)]
    other = f" They are {FOUND[kinds[0]]}: data.{spec.name}.kind={kinds[0]} reads them." if kinds else ""
    return ConfigError(
        f"data.{spec.name}.kind=preference; the rows of {spec.path} are no pairs of a chosen and a rejected answer, "
        f"they have {held}; a pair is chosen and rejected, two strings or turns beside a prompt, or two conversations "
        f"that begin alike, or, for objective=kto, prompt, completion and label; name the fields: "
        f"'data.{spec.name}.fields={{prompt: A, chosen: B, rejected: C}}'.{other}"
    )


def _shape_of(value: object) -> str:
    """Return what a field holds, for an error: `str`, `list of dict with role, content`."""
    value = list_from_json(value)
    if isinstance(value, list) and value:
        first = value[0]
        return f"list of {type(first).__name__}" + (f" with {names_of(first)}" if isinstance(first, dict) else "")
    return f"dict with {names_of(value)}" if isinstance(value, dict) else type(value).__name__


def _refuse_preferences(seen: list[Record], *, spec: SourceSpec) -> None:
    """Raise for rows with a chosen and a rejected answer, unless `spec.fields` picks the chosen one.

    Raises:
        ConfigError: there are such rows, and `spec.fields` does not.
    """
    pair = next((each.fields for each in seen if {"chosen", "rejected"} <= each.fields.keys()), None)
    if pair is None or "chosen" in spec.fields.values():
        return
    chosen, has_prompt = pair["chosen"], pair.get("prompt") is not None
    begins = chosen[0] if isinstance(chosen, list) and chosen and isinstance(chosen[0], dict) else {}
    is_whole = (begins.get("role") or begins.get("from")) not in ("assistant", "gpt") if begins else not has_prompt
    key = "text" if isinstance(chosen, str) and not has_prompt else "messages" if is_whole else "completion"
    kind = "text" if key == "text" else "chat"
    remedy = f"'data.{spec.name}.fields={{{key}: chosen}}' with data.{spec.name}.kind={kind} reads the chosen ones"
    if isinstance(chosen, dict):  # the last turn alone, as LLaMA-Factory has it
        remedy = "add the chosen turn to its conversation and remove both fields"
    raise ConfigError(
        f"{spec.key}; its rows are preference pairs (chosen and rejected answers); data.{spec.name}.kind=preference "
        f"with objective=dpo learns what is preferred; {remedy}, data.{spec.name}.format= another field of the rows."
    )


def _formats_of(seen: list[Record], *, kind: str, needs_answers: bool = True) -> list[str]:
    each = (_format_of(record, kind=kind, needs_answers=needs_answers) for record in seen)
    return sorted({found for found in each if found is not None})


def _format_of(record: Record, *, kind: str, needs_answers: bool = True) -> str | None:
    """Return the format of one row; None if it matches none."""
    text = record.peek("text")
    if kind == "text":
        return "text" if isinstance(text, str) else None
    if kind == "preference":
        return format_of_pair(record)
    turns, data = (list_from_json(record.peek(*names)) for names in (*FIELDS_OF_FORMAT["messages"], ("data",)))
    if isinstance(turns, list):
        return "messages"
    if isinstance(data, list) and data:
        return "messages" if isinstance(data[0], dict) else "alternating"
    for name in ("question_answer", "instruction"):
        if all(isinstance(record.peek(*either), str) for either in FIELDS_OF_FORMAT[name]):
            return name
    beside = ("completion",) if needs_answers else ()
    if all(isinstance(record.peek(name), str | list) for name in ("prompt", *beside)):
        return "prompt_completion"
    if isinstance(text, str) and "[INST]" in text:
        return "llama2"
    return "human_assistant" if isinstance(text, str) and "### Human:" in text else None


def _format_by_names(record: Record, *, kind: str) -> str | None:
    """Return the format of one row by its fields' names alone, where their types are of none."""
    names = ("text",) if kind == "text" else ("messages", "question_answer", "instruction", "prompt_completion")
    return next(
        (name for name in names if all(record.peek(*each) is not None for each in FIELDS_OF_FORMAT[name])), None
    )


def _only_column(seen: list[Record]) -> str | None:
    """Return the only field of every row if it is text, else None."""
    names = {name for record in seen for name in record.fields}
    is_text = all(isinstance(value, str) for record in seen for value in record.fields.values())
    return names.pop() if len(names) == 1 and is_text else None
