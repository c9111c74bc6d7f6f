"""The shipped orders are what their generator writes, and held-out ones are about what no training order names."""

import json

import pytest

from tpu_experiments.samples import orders
from tpu_experiments.samples.orders import FOLDER, HELD_CITIES, HELD_FORMS, HELD_ITEMS, HELD_NAMES

VALUES = {"name": set(HELD_NAMES), "item": set(HELD_ITEMS), "city": set(HELD_CITIES)}


def rows(name: str) -> list[tuple[str, dict[str, object]]]:
    """Sentence and answer of each row of a shipped file."""
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    turns = [[turn["content"] for turn in json.loads(line)["messages"]] for line in lines]
    return [(sentence, json.loads(answer)) for _, sentence, answer in turns]


def test_the_files_are_what_the_generator_writes() -> None:
    for name, content in orders.shipped().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == content, "run python tpu_experiments/samples/orders.py"


def test_an_answer_says_what_its_sentence_says() -> None:
    for name in ("orders", "known_forms", "new_forms"):
        for sentence, answer in rows(name):
            quantity = answer["quantity"]
            assert isinstance(quantity, int)
            said = [str(quantity), orders.WORDS.get(quantity, str(quantity))]
            assert any(each in sentence.lower() for each in said)
            assert all(str(answer[key]) in sentence for key in VALUES)


@pytest.mark.parametrize("name", ["known_forms", "new_forms"])
def test_no_training_sentence_names_what_is_asked(name: str) -> None:
    read = " ".join(sentence for sentence, _ in rows("orders"))
    asked = rows(name)
    for key, values in VALUES.items():
        assert {answer[key] for _, answer in asked} == values
        assert [value for value in values if value in read] == []


def test_new_forms_are_in_no_training_sentence() -> None:
    parts = [part for form in HELD_FORMS for part in form.split("{name}")[0].split("{") if len(part) > 12]
    read = " ".join(sentence for sentence, _ in rows("orders"))
    assert parts
    assert [part for part in parts if part in read] == []
