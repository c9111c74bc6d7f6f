"""Preference pairs as their data sets have them, and rows that are none."""

import json

import pytest

from tests.data.readers import read, recognised, spec_for, split_rows, written
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.documents import Document

SYSTEM = {"role": "system", "content": "s"}
ASKED = {"role": "user", "content": "q"}
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
ULTRAFEEDBACK = {
    "prompt": "q",
    "prompt_id": "5af",
    "chosen": [ASKED, GOOD],
    "rejected": [ASKED, BAD],
    "messages": [ASKED, GOOD],
    "score_chosen": 8.5,
    "score_rejected": 4.0,
}
SOURCES = {
    "trl_strings": ({"prompt": "q", "chosen": "good", "rejected": "bad"}, "explicit_prompt", ()),
    "trl_turns": ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, "explicit_prompt", ()),
    "trl_implicit": ({"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, "implicit_prompt", ()),
    "ultrafeedback": (ULTRAFEEDBACK, "implicit_prompt", ("prompt_id",)),
    "orca": ({"system": "", "question": "q", "chosen": "good", "rejected": "bad"}, "explicit_prompt", ()),
    "argilla": (
        {"instruction": "q", "chosen_response": "good", "rejected_response": "bad", "chosen_avg_rating": 4.5, "n": 1},
        "explicit_prompt",
        ("chosen_avg_rating", "n"),
    ),
    "argilla_turns": (
        {"prompt": "q", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "chosen-rating": 5, "rejected-rating": 3},
        "implicit_prompt",
        (),
    ),
    "llama_factory": (
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        "explicit_prompt",
        (),
    ),
}


def pair_of(tmp_path, row, **values) -> Document:
    path = written(tmp_path, "pairs.jsonl", json.dumps(row) + "\n")
    [document] = read(path, **({"kind": "preference", "format": "auto"} | values))
    assert isinstance(document, Document), document
    return document


def refused(tmp_path, row, **values):
    path = written(tmp_path, "pairs.jsonl", json.dumps(row) + "\n")
    documents, (refusal,) = split_rows(path, **({"kind": "preference", "format": "explicit_prompt"} | values))
    assert not documents
    return refusal


@pytest.mark.parametrize("name", SOURCES)
def test_pairs_of_each_data_set_are_recognised(tmp_path, name):
    row, layout, unread = SOURCES[name]
    path = written(tmp_path, "a.jsonl", json.dumps(row) + "\n")
    assert recognised(spec_for(path, kind="preference", format="auto")).format == layout
    pair = pair_of(tmp_path, row)
    assert pair.messages == (("user", "q"), ("assistant", "good"))
    assert pair.rejected.messages == (("user", "q"), ("assistant", "bad"))
    assert pair.prompt == (("user", "q"),)
    assert pair.unread == unread


def test_scores_in_text_are_numbers(tmp_path):
    """A CSV file has no others: contradictions in it were not told."""
    for text, number in (("8.5", 8.5), (" 9 ", 9.0), ("1e1", 10.0)):
        assert pair_of(tmp_path, {**ULTRAFEEDBACK, "score_chosen": text}).scores == (number, 4.0)
    for no_number in ("good", "", "nan", float("nan"), True, [1], 10**400):
        assert pair_of(tmp_path, {**ULTRAFEEDBACK, "score_chosen": no_number}).scores is None


def test_scores_are_of_both_answers_or_not_read(tmp_path):
    assert pair_of(tmp_path, ULTRAFEEDBACK).scores == (8.5, 4.0)
    assert pair_of(tmp_path, SOURCES["argilla_turns"][0]).scores == (5.0, 3.0)
    row = {**ULTRAFEEDBACK, "score_rejected": None}
    pair = pair_of(tmp_path, row)
    assert (pair.scores, pair.unread) == (None, ("prompt_id", "score_chosen"))


def test_fields_are_renamed(tmp_path):
    fields = {"prompt": "ask", "chosen": "yes", "rejected": "no", "score_chosen": "up", "score_rejected": "down"}
    row = {"ask": "q", "yes": "good", "no": "bad", "up": 2, "down": 1, "prompt": "other"}
    pair = pair_of(tmp_path, row, fields=fields)
    assert (pair.messages, pair.scores) == ((("user", "q"), ("assistant", "good")), (2.0, 1.0))
    assert pair.unread == ("prompt",)
    with pytest.raises(ConfigError, match="has no field 'text'"):
        pair_of(tmp_path, row, fields={**fields, "text": "ask"})


def test_a_prompt_has_system_history_tools_and_reasoning(tmp_path):
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    row = {
        "system_prompt": "s",
        "history": [["q0", "a0"]],
        "prompt": "q",
        "chosen": [{**GOOD, "reasoning_content": "because"}],
        "rejected": [BAD],
        "tools": [tool],
    }
    pair = pair_of(tmp_path, row)
    prompt = (("system", "s"), ("user", "q0"), ("assistant", "a0"), ("user", "q"))
    assert pair.prompt == prompt
    assert pair.messages == (*prompt, ("assistant", "good"))
    assert pair.context == pair.rejected.context == (2,), "earlier answers are read, not learnt"
    assert pair.reasoning == {4: "because"}
    assert pair.rejected.reasoning == {}
    assert json.loads(pair.tools) == json.loads(pair.rejected.tools) == [tool]
    assert pair.unread == ()


def test_the_prompt_is_what_both_conversations_begin_with(tmp_path):
    earlier = {"role": "assistant", "content": "a0"}
    chosen = [SYSTEM, ASKED, earlier, ASKED, GOOD]
    pair = pair_of(tmp_path, {"chosen": chosen, "rejected": [SYSTEM, ASKED, earlier, ASKED, BAD, ASKED]})
    assert [role for role, _ in pair.prompt] == ["system", "user", "assistant", "user"]
    assert pair.rejected.messages[-1] == ("assistant", "bad"), "turns after the last answer are dropped"
    longer = pair_of(tmp_path, {"chosen": chosen, "rejected": [SYSTEM, ASKED, earlier]})
    assert [role for role, _ in longer.prompt] == ["system", "user"]
    assert (longer.context, longer.rejected.context) == ((2,), ())


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": ""}, "empty_answer"),
        ({"prompt": "q", "chosen": [], "rejected": "b"}, "empty_answer"),
        ({"prompt": "q", "chosen": [{**GOOD, "content": " "}], "rejected": "b"}, "empty_answer"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "same_answers"),
        ({"prompt": "q", "chosen": "a", "rejected": 4}, "wrong_type"),
        ({"prompt": "q", "chosen": "a"}, "no_field"),
        ({"prompt": [], "chosen": "a", "rejected": "b"}, "no_field"),
        ({"prompt": [SYSTEM], "chosen": "a", "rejected": "b"}, "no_prompt"),
        ({"prompt": "q", "chosen": [ASKED, GOOD], "rejected": "b"}, "wrong_type"),
        ({"prompt": "q", "chosen": [{"role": "x", "content": "a"}], "rejected": "b"}, "bad_role"),
    ],
)
def test_bad_pairs_are_refused_as_bad_rows(tmp_path, row, reason):
    refusal = refused(tmp_path, row)
    assert (refusal.reason, refusal.is_bad_row) == (reason, True)


def test_conversations_without_a_common_beginning_are_bad_rows(tmp_path):
    other = {"role": "user", "content": "q2"}
    refusal = refused(tmp_path, {"chosen": [ASKED, GOOD], "rejected": [other, BAD]}, format="implicit_prompt")
    assert refusal.reason == "no_common_prompt"


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"text": "a"}, "they have text (str)"),
        ({"messages": [ASKED, GOOD]}, "data.x.kind=chat reads them"),
        ({"chosen": "H: q A: good", "rejected": "H: q A: bad"}, "they have chosen (str), rejected (str)"),
        ({"response_1": "a", "response_2": "b", "prompt": "q"}, "response_1 (str), response_2 (str), prompt (str)"),
        ({"prompt": "q", "chosen": [ASKED, GOOD], "rejected": "b"}, "chosen (list of dict with role, content)"),
    ],
)
def test_other_rows_are_refused_with_what_they_hold(tmp_path, row, found):
    with pytest.raises(ConfigError) as error:
        pair_of(tmp_path, row)
    sentence = str(error.value)
    assert sentence.startswith("data.x.kind=preference; the rows of ")
    assert found in sentence
    assert "\n" not in sentence
