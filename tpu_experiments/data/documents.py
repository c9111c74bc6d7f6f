"""Documents, the output of readers, and `SourceSpec`, their input: a source with its path resolved."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from tpu_experiments.config.data_schema import ASKED, DOCUMENT, FIRST_TURN, FORMATS_OF_KIND, DataSourceConfig
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.storage.paths import find_local

REASONING = "reasoning_content"
"""Name of a turn's reasoning in `Document.extras`, whatever the file calls it."""


@dataclass(frozen=True)
class Document:
    """One text, or one conversation as (role, content) pairs; exactly one of the two is set."""

    id: str
    text: str | None = None
    messages: tuple[tuple[str, str], ...] | None = None
    place: str = ""
    """Where it was read, for reports: `line 17 of a.jsonl`."""
    group: str | None = None
    """Value of the field `data.<name>.split_by`; documents of one group are assigned to one split."""

    context: tuple[int, ...] = ()
    """Indices of assistant turns, from 0, that are read as context and not trained on (`train: false`)."""
    extras: tuple[str, ...] = ()
    """Per turn, the JSON of its template fields beside the content (`reasoning_content`, `tool_calls`, `name`,
    `tool_call_id`), or ""; empty where no turn has any."""
    tools: str = ""
    """The tools offered to the assistant, as a JSON list."""
    label: str | None = None
    """What a text is classified as; of a single answer, whether it is good, `true` or `false`; else None."""
    rejected: "Document | None" = None
    """Of a preference pair, whose chosen conversation the document is, the rejected one."""
    scores: tuple[float, float] | None = None
    """Of a pair, the scores of the chosen and of the rejected answer, by which it was made; no part of the content."""
    margin: float | None = None
    """Of a pair, the margin of scores (`SourceSpec.reads_margin`); no part of the content."""
    unread: tuple[str, ...] = ()
    """Names of the row's fields that were not read, such as `source` or `messages[].score`; no part of the content."""

    def __post_init__(self) -> None:
        assert (self.text is None) != (self.messages is None), "set text or messages, not both"

    @property
    def is_single(self) -> bool:
        """Whether it is a single answer with a label."""
        return self.messages is not None and self.label is not None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read: only white space, or no turn."""
        return not self.messages and not (self.text or "").strip()

    def is_taught(self, turn: int) -> bool:
        """Return whether the turn is an answer to train on: neither blank nor marked as context."""
        role, _ = (self.messages or ())[turn]
        return role == "assistant" and not self.is_blank(turn) and turn not in self.context

    def is_blank(self, turn: int) -> bool:
        """Return whether the turn has neither text nor a tool call."""
        _, content = (self.messages or ())[turn]
        return not content.strip() and not (self.extras and self.extras[turn])

    @property
    def beginning(self) -> str:
        """The beginning of the document, on one line."""
        turns = (f"{role}: {content[: 2 * TEXT_SHOWN]}" for role, content in (self.messages or ())[:TEXT_SHOWN])
        return beginning(self.text if self.text is not None else " / ".join(turns))

    @property
    def content(self) -> str:
        """All of the document but its id, for hashing."""
        if self.text is not None:
            return self.text
        if self.rejected is not None:
            return json.dumps([replace(self, rejected=None).content, self.rejected.content])
        beside = (self.extras, self.tools, self.context)
        return json.dumps([self.messages, *beside] if any(beside) else self.messages)

    @property
    def prompt(self) -> tuple[tuple[str, str], ...]:
        """The turns that the two conversations of a pair begin with."""
        sides = (self.messages or (), self.rejected.messages or () if self.rejected is not None else ())
        pairs = takewhile(lambda both: both[0] == both[1], zip(*sides, strict=False))
        return tuple(turn for turn, _ in pairs)[: min(map(len, sides)) - 1]

    @property
    def reasoning(self) -> dict[int, str]:
        """Reasoning of the turns that have any, by their indices."""
        found = {turn: json.loads(extra).get(REASONING) for turn, extra in enumerate(self.extras) if extra}
        return {turn: text for turn, text in found.items() if text}

    def with_reasoning(self, changed: Mapping[int, str]) -> "Document":
        """Return the document with other reasoning in the turns of `changed`, which have some."""
        extras = list(self.extras)
        for turn, text in changed.items():
            extras[turn] = json.dumps(json.loads(extras[turn]) | {REASONING: text}, ensure_ascii=False)
        return replace(self, extras=tuple(extras))

    @property
    def uses_tools(self) -> bool:
        """Whether a conversation has more than roles and contents."""
        return bool(self.tools or self.extras)


@dataclass(frozen=True)
class Refused:
    """A row or document that was left out, and the reason; it is counted and reported, never lost."""

    reason: str
    """Slug that counts are kept under: `not_json`, `too_short`, `exact_duplicate`."""
    place: str
    """`line 17 of a.jsonl`."""
    message: str
    """The problem and its remedy, without key and place."""
    is_bad_row: bool = True
    """Whether `on_bad_row` applies; False where a rule left the row out as configured."""
    text: str = ""
    """The beginning of the row, on one line."""


TEXT_SHOWN = 200
SAME_ANSWERS = "has the same answer as chosen and rejected, so that there is nothing to prefer; remove the row."
SAME_BUT_FOR_BLANKS = (
    "has a chosen and a rejected answer that differ in the blanks at their ends alone, so that there is nothing to "
    "prefer; remove the row."
)


def beginning(text: str) -> str:
    """Return the first `TEXT_SHOWN` characters of a text on one line, encodable as UTF-8."""
    line = " ".join(text[: 2 * TEXT_SHOWN].split())
    line = line.encode("utf-8", "replace").decode()
    return line if len(line) <= TEXT_SHOWN and len(text) <= 2 * TEXT_SHOWN else f"{line[: TEXT_SHOWN - 1]}…"


@dataclass(frozen=True)
class SourceSpec:
    """One source with its path resolved; the argument of a reader (`data.<name>._target_`)."""

    name: str
    path: str
    hub_config: str | None = None
    hub_split: str = "train"
    revision: str | None = None
    kind: str = "text"
    format: str = "auto"
    fields: dict[str, str] = field(default_factory=dict)
    quoting: str = "auto"
    on_bad_row: str = "stop"
    max_documents: int | None = None
    group_field: str | None = None
    """Row field that `Document.group` is read from."""
    asked_as: str | None = None
    """`data.<name>.asked_as`, and `asked_alone_as`."""
    asked_alone_as: str | None = None
    label_field: str | None = None
    """Row field that `Document.label` is read from; None where texts have no labels."""
    reads_margin: bool = False
    """Whether `Document.margin` is read from the field `margin` of every pair."""
    needs_answers: bool = True
    """False where the model writes the answers itself: a row's `answer` is the reference of a question at its end."""
    keep: dict[str, list[Any]] = field(default_factory=dict)
    """Allowed values by row field (under the file's own names); rows with other values are left out."""
    eval_path: str | None = None
    test_path: str | None = None
    eval_split: str | None = None
    test_split: str | None = None
    named_splits: str = "take"
    rewritten_answers: str = "split"
    """`data.<name>.rewritten_answers`."""
    path_key: str = "path"
    """Key of the source's config that `path` was read from."""

    @property
    def key(self) -> str:
        """Prefix of every error message about this source."""
        return f"{self.path_override}{self.path}"

    @property
    def path_override(self) -> str:
        """The config key to set in an error's remedy: `data.<name>.path=`."""
        return f"data.{self.name}.{self.path_key}="


def spec_of(
    name: str,
    source: DataSourceConfig,
    *,
    data_size: str,
    is_labelled: bool = False,
    reads_margin: bool = False,
    needs_answers: bool = True,
) -> SourceSpec:
    """Resolve the path of a configured source; `data_size` is `full` or `sample`.

    Args:
        is_labelled: the texts are read with their labels.
        reads_margin: pairs are read with their margins.
        needs_answers: conversations are learnt; else their prompts are asked.

    Raises:
        ConfigError: the sample is requested and there is none, `kind` and `format` do not agree, or labels are wanted
            of conversations or without a field.
    """
    if is_labelled and source.kind != "text":
        raise ConfigError(
            f"data.{name}.kind={source.kind} with objective=classify; it classifies texts; write data.{name}.kind=text "
            f"data.{name}.format=text, and the field of the text as +data.{name}.fields.text=FIELD."
        )
    if is_labelled and source.label_field is None:
        raise ConfigError(
            f"data.{name}.label_field=null with objective=classify; a text's label is read from a field of its row; "
            f"write data.{name}.label_field=FIELD."
        )
    path = source.sample_path if data_size == "sample" else source.path
    if path is None:
        raise ConfigError(f"data_size=sample but data.{name}.sample_path is not set; set it, or use data_size=full.")
    if source.format not in FORMATS_OF_KIND[source.kind]:
        kind = next(k for k, formats in FORMATS_OF_KIND.items() if source.format in formats)
        raise ConfigError(
            f"data.{name}.format={source.format} with data.{name}.kind={source.kind}; that format "
            f"gives {kind} documents; set data.{name}.kind={kind} or another format."
        )
    # A sample replaces all of the data, held-out files included, so it is split by the hash.
    keys = ("eval_path", "test_path", "eval_split", "test_split") if data_size == "full" else ()
    return SourceSpec(
        name=name,
        path=str(find_local(path) or path),
        hub_config=source.hub_config,
        hub_split=source.hub_split,
        revision=source.revision,
        kind=source.kind,
        format=source.format,
        fields=dict(source.fields),
        quoting=source.quoting,
        on_bad_row=source.on_bad_row,
        max_documents=source.max_documents,
        **{key: getattr(source, key) for key in ASKED},
        label_field=source.label_field if is_labelled else None,
        reads_margin=reads_margin,
        needs_answers=needs_answers,
        keep={name: list(values) for name, values in source.keep.items()},
        group_field=None if source.split_by in (FIRST_TURN, DOCUMENT) else source.split_by,
        named_splits=source.named_splits,
        rewritten_answers=source.rewritten_answers,
        **{key: getattr(source, key) for key in keys},
    )


def raise_if_bad(refused: Refused, *, spec: SourceSpec) -> None:
    """Raise for a bad row where `on_bad_row` is stop.

    Raises:
        ConfigError: the row is bad and `on_bad_row` is stop.
    """
    if refused.is_bad_row and spec.on_bad_row == "stop":
        raise ConfigError(
            f"{spec.key}; {refused.place} {refused.message} Or leave such rows out and have them reported: "
            f"data.{spec.name}.on_bad_row=skip."
        )


def no_document(spec: SourceSpec) -> ConfigError:
    """Return the error for a source without a single document."""
    return ConfigError(
        f"{spec.key}; it is empty: 0 documents were read; point {spec.path_override} at a file with at least one row."
    )
