import doctest
import json
from decimal import Decimal

import pytest

from tpu_experiments.rewards import functions
from tpu_experiments.rewards.functions import json_schema, number, regex, result_of

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
        ("1,8", False),  # a comma of decimals
        ("#### 18, no\n#### 17", True),  # GSM8K's script takes the first, so that no second guess counts
        ("#### 17\n#### 18", False),
        (r"so \boxed{18}, which is below 20", True),
        (r"\boxed{17} is wrong: \boxed{18} of 20", True),
        (r"\boxed{\text{none}} of 18", False),
        ("36-18=18", True),
        ("12 + 6 = 18%", True),
        ("1.8e1 km", True),
        ("\u0661\u0668", True),  # Arabic digits
        ("1" * 10**6, False),
        ("1e999999999999999999999", False),
        ("18" + "0" * 10**5, False),
    ],
)
def test_a_number_is_the_last_one_or_that_behind_the_mark(completion: str, right: bool) -> None:
    assert number("", completion, {"answer": "9 * 2 = <<9*2=18>>18\n#### 18"}) == float(right)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,200", "1200"),
        ("1,234,567.50", "1234567.5"),
        ("1,00,000", "100000"),
        ("3,5 lei", "3.5"),
        ("0,125", "0.125"),
        ("1.234,50 lei", "1234.5"),
        ("1.234.567", "1234567"),
        ("1.234", "1.234"),
        ("1\u00a0200", "1200"),
        (r"1{,}200", "1200"),
        (r"1\,200", "1200"),
        (".5", "0.5"),
        ("-$5", "-5"),
        (r"-\$5", "-5"),
        ("\u22125", "-5"),
        ("x=-5", "-5"),
        ("10-5", "5"),
        ("(10)-5", "5"),
        ("2E-3", "0.002"),
        ("5 e 3", "3"),
        ("18.", "18"),
    ],
)
def test_marks_of_numbers_are_read_as_they_are_written(text: str, value: str) -> None:
    assert result_of(text) == Decimal(value)


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
        ("[" * 10**5, False),
        ('{"n": ' * 10**5, False),
        ('{"n": NaN}', False),
        ('```python\nprint({})\n```\nso\n```json\n{"n": 4}\n```', True),
        ('```\n{"n": 4}\n```', True),
    ],
)
def test_json_is_what_the_schema_allows(completion: str, right: bool) -> None:
    assert json_schema("", completion, {}, schema=SCHEMA) == float(right)
    assert json_schema("", completion, {"schema": SCHEMA}) == float(right)
    assert json_schema("", completion, {"form": json.dumps(SCHEMA)}, column="form") == float(right)


def test_json_may_have_a_fence_in_a_text() -> None:
    assert json_schema("", '{"code": "```x```"}', {}, schema={"required": ["code"]}) == 1.0


def test_an_accent_may_be_a_character_of_its_own() -> None:
    assert functions.exact("", "s\u0326i ", {"answer": "\u0219i"}) == 1.0


def test_what_is_no_schema_is_told() -> None:
    with pytest.raises(ValueError, match="the schema is none"):
        json_schema("", "{}", {}, schema={"type": "nothing"})
