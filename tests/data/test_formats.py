import re

import pytest

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.documents import SourceSpec
from tpu_experiments.data.formats import Row, document_of

QUESTION_ANSWER = {
    "id": "uk-1",
    "question": "Is it an offer?",
    "answer": "No.",
    "topic": "Contract Law - Offer",
    "difficulty": "basic",
    "case_citation": "Fisher v Bell [1961] 1 QB 394",
    "reasoning": "Step 1: Look.",
}


def document(fields, kind_of_row):
    spec = SourceSpec(name="x", path="rows.jsonl", kind="chat", format=kind_of_row)
    return document_of(Row(fields, "rows.jsonl", "line", 3), spec=spec)


def complaint(fields, kind_of_row):
    with pytest.raises(ConfigError) as caught:
        document(fields, kind_of_row)
    assert str(caught.value).startswith("data.x.path=rows.jsonl; ")
    return str(caught.value)


def test_text_and_its_ids():
    assert document({"text": "Bună"}, "text").text == "Bună"
    assert document({"text": "a"}, "text").id == "rows.jsonl:3"
    assert document({"text": "a", "id": 7}, "text").id == "7"
    assert document({"text": "a", "id": None}, "text").id == "rows.jsonl:3"


@pytest.mark.parametrize("column", ["messages", "conversations"])
@pytest.mark.parametrize(("role", "content"), [("role", "content"), ("from", "value")])
def test_messages_in_every_spelling(column, role, content):
    names = [("system", "system"), ("human", "user"), ("GPT", "assistant")]
    names += [("prompter", "user"), ("bot", "assistant"), ("user", "user"), ("model", "assistant")]
    turns = [{role: name, content: f"turn {i}"} for i, (name, _) in enumerate(names)]
    expected = tuple((wanted, f"turn {i}") for i, (_, wanted) in enumerate(names))
    assert document({column: turns}, "messages").messages == expected


def test_alternating():
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    assert document({"data": list("abcd")}, "alternating").messages == tuple(turns)
    assert document({"data": list("abc")}, "alternating").messages == tuple(turns[:2])


@pytest.mark.parametrize("turns", [[], ["alone"]])
def test_fewer_than_two_turns_are_an_empty_document(turns):
    assert document({"data": turns}, "alternating").is_empty


def test_question_answer_is_the_recipes_text():
    question, answer = document(QUESTION_ANSWER, "question_answer").messages
    assert question == ("user", "Is it an offer?")
    assert answer == (
        "assistant",
        "### Topic: Contract Law - Offer\n### Difficulty: basic\n\n"
        "### Reasoning:\nStep 1: Look.\n\n"
        "### Answer:\nNo.\n\n### Case Citation:\nFisher v Bell [1961] 1 QB 394",
    )


def test_question_answer_leaves_out_what_is_empty():
    fields = QUESTION_ANSWER | {"reasoning": "", "case_citation": None}
    head = "### Topic: Contract Law - Offer\n### Difficulty: basic\n\n### Answer:\nNo."
    assert document(fields, "question_answer").messages[1] == ("assistant", head)
    bare = {"question": "q", "answer": "a"}
    assert document(bare, "question_answer").messages[1] == ("assistant", "### Answer:\na")


@pytest.mark.parametrize(
    ("fields", "kind_of_row", "sentence"),
    [
        (
            {"content": "a", "url": "b"},
            "text",
            "line 3 of rows.jsonl has no field 'text', which data.x.format=text needs; it has "
            "content, url; mend or remove the row.",
        ),
        ({"text": None}, "text", "has null in 'text'"),
        ({"data": ["a", "b"]}, "messages", "no field 'messages or conversations'"),
        ({"data": ["a", "b"]}, "messages", "try data.x.format=alternating."),
        ({"messages": []}, "alternating", "try data.x.format=messages."),
        ({"question": "q"}, "question_answer", "no field 'answer'"),
        ({}, "text", "it has no field;"),
        ({"text": 3}, "text", "'text' in line 3 of rows.jsonl is int, not a string"),
        ({"data": "ab"}, "alternating", "'data' in line 3 of rows.jsonl is str, not a list"),
        ({"data": ["a", 1]}, "alternating", "not a list of strings, user first"),
        ({"messages": "a"}, "messages", "'messages' in line 3 of rows.jsonl is str"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": None},
                ]
            },
            "messages",
            "turn 2 in line 3 of rows.jsonl has no role and content (or from and value) of type "
            "str; it has role (str), content (NoneType);",
        ),
        ({"messages": ["a"]}, "messages", "it has str; mend"),
        (
            {"messages": [{"role": "assistants", "content": "a"}]},
            "messages",
            "has the role 'assistants'. Did you mean 'assistant'?",
        ),
        ({"text": "a\ud800"}, "text", r"half of a UTF-16 pair (\ud800) at character 1;"),
    ],
)
def test_error_sentences(fields, kind_of_row, sentence):
    assert re.search(re.escape(sentence), complaint(fields, kind_of_row))
