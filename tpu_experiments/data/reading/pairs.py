"""Preference pairs, and single answers with a label: the turns of a prompt and of its answers.

explicit_prompt  a prompt (`prompt`, `question`, `instruction` or `input`, a string, or a list of turns, also as
                 `messages` or `conversations`) and two answers, each a string, a turn or a list of turns: TRL's
                 explicit prompt, orca_dpo_pairs, Argilla's and LLaMA-Factory's pairs
implicit_prompt  `chosen` and `rejected`, two whole conversations; the prompt is their common first turns, as in TRL. A
                 `prompt` beside them repeats their first question, as in ultrafeedback_binarized
unpaired         a prompt, one answer (`completion`, `response`, `output` or `answer`) and a `label` or `kto_tag` that
                 says whether it is good: TRL's unpaired preferences; also a whole conversation (`messages`) and a label
"""

import json
import math
from typing import Any

from tpu_experiments.data.documents import SourceSpec
from tpu_experiments.data.reading.fields import BadRow, Record, encodable, is_empty, list_from_json, names_of
from tpu_experiments.data.reading.names import ROLES
from tpu_experiments.data.reading.turns import Turn, turn_of, with_calls_joined

CHOSEN = ("chosen", "chosen_response")
REJECTED = ("rejected", "rejected_response")
PROMPT = ("prompt", "question", "instruction", "input", "messages", "conversations")
COMPLETION = ("completion", "response", "output", "answer")
LABEL = ("label", "kto_tag")
LABELS = {
    **dict.fromkeys(("true", "1", "1.0", "yes", "good", "desirable", "chosen"), True),
    **dict.fromkeys(("false", "0", "0.0", "no", "bad", "undesirable", "rejected"), False),
}
"""Labels of single answers, as text in small letters: whether the answer is good."""
SCORES = (
    ("score_chosen", "chosen_score", "chosen_rating", "chosen_avg_rating"),
    ("score_rejected", "rejected_score", "rejected_rating", "rejected_avg_rating"),
)
"""Fields with the scores of the two answers, by which the pair was made."""
FIELDS_OF_PAIRS: dict[str, tuple[tuple[str, ...], ...]] = {
    "explicit_prompt": (PROMPT, CHOSEN, REJECTED),
    "implicit_prompt": (CHOSEN, REJECTED),
    "unpaired": (PROMPT, LABEL),
}
MARGIN = "margin"
"""Field with the margin of a pair's scores, TRL's name."""
OPTIONAL_OF_PAIRS = (*PROMPT, *COMPLETION, "score_chosen", "score_rejected", MARGIN)

Pair = tuple[list[Turn], list[Turn], list[Turn]]


def format_of_pair(record: Record) -> str | None:
    """Return the format of a row with two answers, or one and its label; None if it has none that can be read."""
    answers = [list_from_json(record.peek(*names)) for names in (CHOSEN, REJECTED)]
    if all(_begins_conversation(answer) for answer in answers):
        return "implicit_prompt"
    are_answers = all(isinstance(each, str | dict) or _role_of(each) == "assistant" for each in answers)
    has_prompt = isinstance(list_from_json(record.peek(*PROMPT)), str | list)
    if are_answers and has_prompt:
        return "explicit_prompt"
    has_answer = isinstance(list_from_json(record.peek(*COMPLETION)), str | list | dict)
    is_whole = _begins_conversation(list_from_json(record.peek("messages", "conversations")))
    is_single = record.peek(*LABEL) is not None and not any(record.peek(*names) for names in (CHOSEN, REJECTED))
    return "unpaired" if is_single and ((has_prompt and has_answer) or is_whole) else None


def turns_of_pair(record: Record, *, spec: SourceSpec, unread: set[str]) -> Pair:
    """Return the turns of the prompt, of the chosen and of the rejected answer.

    Args:
        unread: gets the names of fields inside turns that were not read.

    Raises:
        BadRow: a field is missing or of another type, or the two conversations do not begin alike.
    """
    sides = [_turns(record, names, role="assistant", spec=spec, unread=unread) for names in (CHOSEN, REJECTED)]
    if spec.format == "explicit_prompt":
        return _turns(record, PROMPT, role="user", spec=spec, unread=unread), sides[0], sides[1]
    shared = 0
    while shared < min(map(len, sides)) and sides[0][shared] == sides[1][shared]:
        shared += 1
    if not shared:
        raise BadRow(
            "no_common_prompt",
            f"has conversations in {column_of(record, CHOSEN)!r} and {column_of(record, REJECTED)!r} that "
            f"{_difference(*sides)}, so that they do not answer the same prompt; mend or remove the row.",
        )
    if shared == min(map(len, sides)) and shared and sides[0][shared - 1].role == "assistant":
        shared -= 1  # one of them goes on where the other ends: the answer in which they agree is the end of that one
    _mark_repeated(record, sides[0])
    return sides[0][:shared], sides[0][shared:], sides[1][shared:]


def turns_of_single(record: Record, *, spec: SourceSpec, unread: set[str]) -> tuple[list[Turn], list[Turn]]:
    """Return the turns of the prompt and of its only answer; of a whole conversation the last answer is that.

    Raises:
        BadRow: a field is missing or of another type.
    """
    prompt = _turns(record, PROMPT, role="user", spec=spec, unread=unread)
    if record.peek(*COMPLETION) is not None:
        return prompt, _turns(record, COMPLETION, role="assistant", spec=spec, unread=unread)
    last = max((number for number, turn in enumerate(prompt) if turn.role == "assistant"), default=None)
    if last is None:
        if (own := record.named(*COMPLETION)) is not None:
            raise empty_answer(own)
        raise BadRow(
            "no_field",
            f"has no answer, neither a turn of the assistant in {column_of(record, PROMPT)!r} nor a field "
            f"{_any_of(COMPLETION, spec)!r}; it has {names_of(record.fields)}; mend or remove the row.",
        )
    return prompt[:last], prompt[last:]


def label_of(record: Record, *, spec: SourceSpec) -> bool:
    """Return whether a single answer is labelled as good.

    Raises:
        BadRow: the label is missing, or says neither.
    """
    name, value = record.find(*LABEL) or (record.named(*LABEL) or spec.fields.get(LABEL[0], LABEL[0]), None)
    label = LABELS.get(str(value).strip().lower()) if isinstance(value, bool | int | float | str) else None
    if label is None:
        raise BadRow(
            "bad_label",
            f"has {json.dumps(value, ensure_ascii=False, default=str)[:40]} in {name!r}, which says whether its answer "
            "is good: true or false, 1 or 0, good or bad, desirable or undesirable; mend or remove the row.",
        )
    return label


def scores_of(record: Record) -> tuple[float, float] | None:
    """Return the scores of the chosen and of the rejected answer; None where they are not two numbers."""
    chosen, rejected = (_number(record.peek(*names)) for names in SCORES)
    if chosen is None or rejected is None:
        return None
    for names in SCORES:
        record.find(*names)
    return chosen, rejected


def margin_of(record: Record, *, spec: SourceSpec) -> float:
    """Return the margin of a pair's scores.

    Raises:
        BadRow: it is missing, or no finite number.
    """
    found = record.find(MARGIN)
    name, value = (spec.fields.get(MARGIN, MARGIN), None) if found is None else found
    margin = _number(value)
    if margin is None or not math.isfinite(margin):
        raise BadRow(
            "bad_margin",
            f"has {json.dumps(value, ensure_ascii=False, default=str)[:40]} in {name!r}, which objective.margin=true "
            "reads as the margin of the pair's scores, a number; mend or remove the row, or leave that setting out.",
        )
    return margin


def _number(value: Any) -> float | None:
    """Return a number, also one in text, as CSV has it; None of anything else and of NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):  # a whole number may be larger than any float
        return None
    return found if found == found else None


def _turns(record: Record, names: tuple[str, ...], *, role: str, spec: SourceSpec, unread: set[str]) -> list[Turn]:
    found = record.find(*names)
    if found is None or is_empty(found[1]):
        named = record.named(*names) if found is None else found[0]
        if named is not None and role == "assistant":
            raise empty_answer(named)
        own = named or _any_of(names, spec)
        raise BadRow(
            "no_field",
            f"has nothing in {own!r}, which data.{spec.name}.format={spec.format} needs; it has "
            f"{names_of(record.fields)}; mend or remove the row.",
        )
    name, value = found[0], list_from_json(found[1])
    if isinstance(value, str):
        return [Turn(role, encodable(value, name=name))]
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise BadRow(
            "wrong_type",
            f"has {type(value).__name__} in {name!r}, not a string or a list of turns, as data.{spec.name}.format="
            f"{spec.format} needs; mend the row or choose another format.",
        )
    turns = [turn_of(turn, number=number, unread=unread, path=f"{name}[]") for number, turn in enumerate(value, 1)]
    if role == "assistant" and spec.format == "explicit_prompt" and turns and turns[0].role in ("system", "user"):
        raise BadRow(
            "wrong_type",
            f"has a whole conversation in {name!r}, not an answer to the prompt beside it; choose data.{spec.name}."
            "format=implicit_prompt, or mend the row.",
        )
    return with_calls_joined(turns)


def column_of(record: Record, *kinds: tuple[str, ...]) -> str:
    """Return the name in the user's row of the first of these fields that has a value."""
    return next(found[0] for names in kinds if (found := record.find(*names)) is not None)


def _any_of(names: tuple[str, ...], spec: SourceSpec) -> str:
    return " or ".join(spec.fields.get(name, name) for name in names)


def empty_answer(name: str) -> BadRow:
    """Return the error of an answer with nothing in it."""
    return BadRow(
        "empty_answer", f"has an empty answer in {name!r}, which nothing is learnt from; mend or remove the row."
    )


def _difference(chosen: list[Turn], rejected: list[Turn]) -> str:
    """Return how two conversations begin that have no first turn in common."""
    systems = [bool(side) and side[0].role == "system" for side in (chosen, rejected)]
    if sum(systems) == 1:
        return f"begin with a system turn in the {'chosen' if systems[0] else 'rejected'} one alone"
    return "begin with different turns"


def _mark_repeated(record: Record, chosen: list[Turn]) -> None:
    """Mark fields as read that repeat what `chosen` says: its first question, or all of it."""
    first = next((turn.content for turn in chosen if turn.role == "user"), None)
    for name in PROMPT:
        found = record.find(name)
        if found is not None and found[1] != first and found[1] != record.peek(*CHOSEN):
            record.unmark(found[0])


def _begins_conversation(value: Any) -> bool:
    return _role_of(value) in ("system", "user")


def _role_of(value: Any) -> str | None:
    """Return the role of the first turn of a list; None if it is none."""
    first = value[0] if isinstance(value, list) and value else None
    name = (first.get("role") or first.get("from")) if isinstance(first, dict) else None
    return ROLES.get(name.strip().lower()) if isinstance(name, str) else None
