"""Rewards that the package brings along, each `(prompt, completion, row, **arguments) -> float`.

`row` is what the data has beside the prompt, by column. A function of one's own has the same form.
"""

import json
import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from tpu_experiments.config.errors import ConfigError

NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
MARK = "####"
"""What GSM8K (arXiv 2110.14168) writes before its result."""
FENCED = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)


def exact(prompt: str, completion: str, row: Mapping[str, Any], *, column: str = "answer") -> float:
    """Return 1 for the row's answer, without the space around it.

    >>> exact("2 + 2 =", " four\\n", {"answer": "four"})
    1.0
    """
    return float(completion.strip() == str(row[column]).strip())


def number(prompt: str, completion: str, row: Mapping[str, Any], *, column: str = "answer") -> float:
    """Return 1 where the result is that of the row: the first number behind `####`, without one the last number.

    >>> number("", "5 and 1,200.0, so it is\\n#### 1,200 pears of 3", {"answer": "6 * 200 = 1200\\n#### 1200"})
    1.0
    """
    right = result_of(str(row[column]))
    if right is None:
        raise ValueError(f"{column} of the row has no number")
    return float(result_of(completion) == right)


def result_of(text: str) -> Decimal | None:
    """Return the result that a text gives; None without one."""
    _, mark, after = text.rpartition(MARK)
    found = NUMBER.findall(after)
    if not found:
        return None
    try:
        return Decimal((found[0] if mark else found[-1]).replace(",", ""))
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
    fenced = FENCED.search(completion)
    try:
        value = json.loads(fenced[1] if fenced else completion)
    except ValueError:
        return 0.0
    return float(kind(schema).is_valid(value))
