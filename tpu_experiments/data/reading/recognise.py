"""`format: auto`: which format the first rows of a source are in."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.data.documents import FORMATS_OF_KIND, Refused, SourceSpec, no_document
from tpu_experiments.data.reading.formats import FIELDS_OF_FORMAT, OPTIONAL_FIELDS, fields_of, names_of
from tpu_experiments.data.reading.raw_rows import RawRow

NUM_ROWS_SEEN = 20
MAX_ROWS_TRIED = 1000

Fields = Mapping[str, Any]


def recognise(rows: Iterable[RawRow | Refused], *, spec: SourceSpec) -> SourceSpec:
    """`spec` with the format that the first readable rows are in; as it is when it names one.

    Of a table with one column of text, that column is the text. Rows that are of no format are left to the reader,
    which reports them one by one, unless all are.

    Raises:
        ConfigError: no row, none readable, none of a format of `spec.kind`, rows of several formats, or
            `spec.fields` renames a field that the format has not.
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
    """Rows with a chosen and a rejected answer are read only where a key says which.

    Raises:
        ConfigError: there are such rows, and none does.
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
    """The format of one row; None when it shows none."""
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
    """The one field of every row, when it is text."""
    names = {name for fields in seen for name in fields}
    is_text = all(isinstance(value, str) for fields in seen for value in fields.values())
    return names.pop() if len(names) == 1 and is_text else None
