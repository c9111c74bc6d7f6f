import doctest
import json

import pytest

from tpu_experiments.rewards import functions
from tpu_experiments.rewards.functions import json_schema, number, regex

SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}, "additionalProperties": False}


def test_examples() -> None:
    assert doctest.testmod(functions).failed == 0
    assert doctest.testmod(functions).attempted >= 4


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("18", True),
        ("He has 3 and 4, that is $18.00.", True),
        ("18 and then 19", False),
        ("#### 18\nThe next question: 7", True),
        ("#### 17", False),
        ("#### none", False),
        ("-18", False),
        ("nothing", False),
        ("1,8", True),  # as GSM8K's own answers write thousands
        ("18" + "0" * 10**5, False),
    ],
)
def test_a_number_is_the_last_one_or_that_behind_the_mark(completion: str, right: bool) -> None:
    assert number("", completion, {"answer": "9 * 2 = <<9*2=18>>18\n#### 18"}) == float(right)


def test_a_row_without_a_number_is_told() -> None:
    with pytest.raises(ValueError, match="answer of the row has no number"):
        number("", "4", {"answer": "four"})


def test_a_pattern_matches_the_whole_answer() -> None:
    pattern = r"<a>.*</a>"
    assert [regex("", text, {}, pattern=pattern) for text in ("<a>1\n2</a>\n", "so <a>1</a>", "<a>1")] == [
        1.0,
        0.0,
        0.0,
    ]


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ('{"n": 4}', True),
        ('Here:\n```json\n{"n": 4}\n```\nso', True),
        ('{"n": "4"}', False),
        ('{"n": 4, "m": 1}', False),
        ('so {"n": 4}', False),
        ("[" * 10, False),
    ],
)
def test_json_is_what_the_schema_allows(completion: str, right: bool) -> None:
    assert json_schema("", completion, {}, schema=SCHEMA) == float(right)
    assert json_schema("", completion, {"schema": SCHEMA}) == float(right)
    assert json_schema("", completion, {"form": json.dumps(SCHEMA)}, column="form") == float(right)


def test_what_is_no_schema_is_told() -> None:
    with pytest.raises(ValueError, match="the schema is none"):
        json_schema("", "{}", {}, schema={"type": "nothing"})
