"""Rewards that the package brings along, each `(prompt, completion, row, **arguments) -> float`.

`row` is what the data has beside the prompt, by column. A function of one's own has the same form.
"""

import contextlib
import json
import re
import unicodedata
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from tpu_experiments.config.errors import ConfigError

NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])[-\u2212]\\?[$€£]?)?(?P<digits>\d+(?:[.,\u00a0\u202f]\d+)*|\.\d+)(?P<exponent>[eE][-+]?\d+)?"
)
"""A minus behind a digit or a letter subtracts."""
MARK = "####"
"""What GSM8K (arXiv 2110.14168) writes before its result."""
BOX = "\\boxed{"
FENCED = re.compile(r"```(json\b)?\s*(.*?)```", re.DOTALL)


def exact(prompt: str, completion: str, row: Mapping[str, Any], *, column: str = "answer") -> float:
    """Return 1 for the row's answer, without the space around it; an accent may be a character of its own.

    >>> exact("2 + 2 =", " four\\n", {"answer": "four"})
    1.0
    """
    ours, right = (unicodedata.normalize("NFC", text.strip()) for text in (completion, str(row[column])))
    return float(ours == right)


def number(prompt: str, completion: str, row: Mapping[str, Any], *, column: str = "answer") -> float:
    """Return 1 where the result is that of the row, as `result_of` finds it.

    >>> number("", "5 and 1,200.0, so it is\\n#### 1,200 pears of 3", {"answer": "6 * 200 = 1200\\n#### 1200"})
    1.0
    """
    right = result_of(str(row[column]))
    if right is None:
        raise ValueError(f"{column} of the row has no number")
    return float(result_of(completion) == right)


def result_of(text: str) -> Decimal | None:
    """Return the result that a text gives; None without one.

    It is the first number behind the first `####`, as in GSM8K's own script, else in the last `\\boxed{}`, else the
    last number.
    """
    text = text.replace("{,}", ",").replace("\\,", "\u202f")
    if MARK in text:
        found = NUMBER.search(text.partition(MARK)[2])
    elif BOX in text:
        found = NUMBER.search(text.rpartition(BOX)[2].partition("}")[0])
    else:
        found = max(NUMBER.finditer(text), key=re.Match.start, default=None)
    return None if found is None else _value_of(found)


def _value_of(number: re.Match[str]) -> Decimal | None:
    """Return the value of a number with marks of thousands and of decimals, of which the latter are once and last.

    Where there is one mark alone, a point is of decimals, and a comma is of thousands before three digits.
    """
    digits = re.sub("[\u00a0\u202f]", "", number["digits"])
    whole, last, rest = digits, "", ""
    if marks := re.findall("[.,]", digits):
        last = marks[-1]
        is_thousands = marks.count(last) > 1 or (
            last == "," and len(marks) == 1 and bool(re.fullmatch(r"[^0\D]\d{0,2},\d{3}", digits))
        )
        whole, _, rest = (digits, "", "") if is_thousands else digits.rpartition(last)
    value = f"{re.sub('[.,]', '', whole)}.{rest}{number['exponent'] or ''}"
    try:
        return Decimal(f"{'-' if number['sign'] else ''}{value}")
    except InvalidOperation:  # more digits than it takes
        return None


def regex(prompt: str, completion: str, row: Mapping[str, Any], *, pattern: str) -> float:
    """Return 1 where the pattern matches the whole answer without the space around it; `.` is also a new line.

    >>> regex("", "<think>so</think> 4", {}, pattern=r"<think>.*</think>\\s*\\d+")
    1.0
    """
    return float(re.fullmatch(pattern, completion.strip(), re.DOTALL) is not None)


def length(prompt: str, completion: str, row: Mapping[str, Any], *, least: int = 0, most: int) -> float:
    """Return 1 for an answer of `least` to `most` words, and less the further it is from that.

    >>> [length("", "word " * n, {}, least=2, most=4) for n in (1, 2, 4, 8)]
    [0.5, 1.0, 1.0, 0.5]
    """
    num = len(completion.split())
    if num < least:
        return num / least
    return 1.0 if num <= most else most / num


def json_schema(
    prompt: str, completion: str, row: Mapping[str, Any], *, schema: Any = None, column: str = "schema"
) -> float:
    """Return 1 for JSON, or JSON in a fence, that the schema allows; without `schema` the row has it in `column`.

    Raises:
        ValueError: the schema is none.
    """
    try:
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for
    except ImportError as error:
        raise ConfigError("json_schema; jsonschema is not installed; install it (pip install jsonschema).") from error
    if schema is None:
        schema = json.loads(row[column]) if isinstance(row[column], str) else row[column]
    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"the schema is none: {error.message}") from error
    fenced = sorted(FENCED.findall(completion), key=lambda found: not found[0])  # those that are marked come first
    for text in (completion, *(found[1] for found in fenced[:1])):
        with contextlib.suppress(ValueError, RecursionError):  # the latter of a thousand brackets
            return float(kind(schema).is_valid(json.loads(text, parse_constant=_refused)))
    return 0.0


def _refused(name: str) -> None:
    """Refuse NaN and Infinity, which are Python's and not JSON's."""
    raise ValueError(name)
