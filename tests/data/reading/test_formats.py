"""One row to one document, in every format; what is not of the format gives a Refused with a reason."""

import json
import re

import pytest

from tpu_experiments.data.documents import Document, Refused, SourceSpec
from tpu_experiments.data.reading.formats import document_of
from tpu_experiments.data.reading.raw_rows import RawRow

QUESTION_ANSWER = {
    "id": "uk-1",
    "question": "Is it an offer?",
    "answer": "No.",
    "topic": "Contract Law - Offer",
    "difficulty": "basic",
    "case_citation": "Fisher v Bell [1961] 1 QB 394",
    "reasoning": "Step 1: Look.",
}


def outcome(row, layout, **values):
    spec = SourceSpec(**{"name": "x", "path": "rows.jsonl", "kind": "chat", "format": layout} | values)
    as_dict = document_of(RawRow(row, "rows.jsonl", "line", 3), spec=spec)
    as_line = document_of(RawRow(json.dumps(row).encode(), "rows.jsonl", "line", 3), spec=spec)
    assert as_dict == as_line
    return as_dict


def document(row, layout, **values):
    found = outcome(row, layout, **values)
    assert isinstance(found, Document)
    assert found.place == "line 3 of rows.jsonl"
    return found


def refused(row, layout, **values):
    found = outcome(row, layout, **values)
    assert isinstance(found, Refused)
    assert found.place == "line 3 of rows.jsonl"
    return found


def turns(*contents):
    return tuple((("user", "assistant")[i % 2], content) for i, content in enumerate(contents))


def test_text_and_its_ids():
    assert document({"text": "Bună"}, "text").text == "Bună"
    assert document({"text": "a"}, "text").id == "rows.jsonl:3"
    assert document({"text": "a", "id": 7}, "text").id == "7"
    for no_name in (None, "", ["a"], {"a": 1}):
        assert document({"text": "a", "id": no_name}, "text").id == "rows.jsonl:3"


@pytest.mark.parametrize("column", ["messages", "conversations", "data"])
@pytest.mark.parametrize(("role", "content"), [("role", "content"), ("from", "value")])
def test_messages_in_every_spelling(column, role, content):
    names = [("system", "system"), ("human", "user"), ("GPT", "assistant")]
    names += [("prompter", "user"), ("bot", "assistant"), ("user", "user"), ("model", "assistant")]
    rows = [{role: name, content: f"turn {i}"} for i, (name, _) in enumerate(names)]
    expected = tuple((wanted, f"turn {i}") for i, (_, wanted) in enumerate(names))
    assert document({column: rows}, "messages").messages == expected


def test_alternating():
    assert document({"data": list("abcd")}, "alternating").messages == turns("a", "b", "c", "d")
    assert document({"data": list("abc")}, "alternating").messages == turns("a", "b")


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


def test_a_question_about_something_is_asked_with_it():
    found = document({"question": "q", "answer": "a", "context": "c"}, "question_answer")
    assert (found.messages, found.unread) == (turns("q\n\nc", "a"), ())


@pytest.mark.parametrize("beside", [{}, {"topic": "law"}, {"reasoning": "r"}, {"difficulty": None, "source": "s"}])
def test_an_answer_without_the_recipes_columns_is_learnt_as_written(beside):
    assert document({"question": "q", "answer": "a", **beside}, "question_answer").messages == turns("q", "a")


@pytest.mark.parametrize(
    ("fields", "user"),
    [
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, "Add.\n\n1 2"),
        ({"instruction": "Add.", "context": "1 2", "response": "3"}, "Add.\n\n1 2"),
        ({"instruction": "Add.", "input": "", "output": "3"}, "Add."),
        ({"instruction": "Add.", "output": "3"}, "Add."),
    ],
)
def test_instruction(fields, user):
    assert document(fields, "instruction").messages == turns(user, "3")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<s>[INST] a [/INST] b </s>", turns("a", "b")),
        ("<s>[INST] a\nb [/INST] c </s><s>[INST] d [/INST] e </s>", turns("a\nb", "c", "d", "e")),
        ("[INST] a [/INST] b </s> <s> [INST] d [/INST]", turns("a", "b")),
        ("<s>[INST] a [/INST] b </s><s>[INST] cut", turns("a", "b")),
        ("<s>[INST] a [/INST] x < y, <s>b</s> c </s>", turns("a", "x < y, <s>b</s> c")),
        (
            "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\na [/INST] b </s>",
            (("system", "Be brief."), *turns("a", "b")),
        ),
    ],
)
def test_llama2(text, expected):
    assert document({"text": text}, "llama2").messages == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("### Human: a### Assistant: b", turns("a", "b")),
        ("### Human: a\n### Assistant: b\n### Human: c### Assistant:d", turns("a", "b", "c", "d")),
        ("### Human: a### Assistant: b ### c### Human: d", turns("a", "b ### c")),
        ("A chat.\n\n### Human: a### Assistant: b", (("system", "A chat."), *turns("a", "b"))),
    ],
)
def test_human_assistant(text, expected):
    assert document({"text": text}, "human_assistant").messages == expected


def test_fields_by_other_names():
    row = {"body": "a", "text": "not this", "key": "k"}
    assert document(row, "text", fields={"text": "body", "id": "key"}).text == "a"
    assert document(row, "text", fields={"text": "body", "id": "key"}).id == "k"
    lacking = refused({"text": "a"}, "text", fields={"text": "body"})
    assert lacking.message.startswith("has no field 'body', which data.x.format=text needs; it has no field")
    wrong = refused({"body": 3}, "text", fields={"text": "body"})
    assert wrong.message.startswith("has int in 'body', not a string")


@pytest.mark.parametrize(
    ("fields", "layout", "reason"),
    [
        ({"text": " \n\u00a0"}, "text", "empty"),
        ({"data": []}, "alternating", "no_answer"),
        ({"data": ["alone"]}, "alternating", "no_answer"),
        ({"messages": []}, "messages", "no_answer"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", "no_answer"),
        ({"data": ["a", " "]}, "alternating", "no_answer"),
        ({"instruction": "a", "output": ""}, "instruction", "no_answer"),
        ({"text": "<s>[INST] a [/INST] </s>"}, "llama2", "no_answer"),
        ({"text": "### Human: a"}, "human_assistant", "no_answer"),
    ],
)
def test_nothing_to_learn_is_no_bad_row(fields, layout, reason):
    found = refused(fields, layout)
    assert (found.reason, found.is_bad_row) == (reason, False)


ONE_ANSWER_NULL = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]


@pytest.mark.parametrize(
    ("fields", "layout", "reason", "sentence"),
    [
        (
            {"content": "a", "url": "b"},
            "text",
            "no_field",
            "has no field 'text', which data.x.format=text needs; it has content, url; mend or remove the row.",
        ),
        ({"text": None}, "text", "no_field", "has null in 'text'"),
        ({"data": ["a", "b"]}, "messages", "no_field", "no field 'messages or conversations'"),
        ({"data": ["a", "b"]}, "messages", "no_field", "try data.x.format=alternating."),
        ({"messages": [{}]}, "alternating", "no_field", "try data.x.format=messages."),
        ({"question": "q"}, "question_answer", "no_field", "no field 'answer'"),
        ({"instruction": "q"}, "instruction", "no_field", "no field 'output or response'"),
        ({}, "text", "no_field", "it has no field;"),
        ({f"f{i}": 1 for i in range(30)}, "text", "no_field", "f18, f19 and 10 more; mend"),
        ({"text": 3}, "text", "wrong_type", "has int in 'text', not a string, as data.x.format=text needs"),
        ({"data": "ab"}, "alternating", "wrong_type", "has str in 'data', not a list of strings, user first"),
        ({"data": ["a", 1]}, "alternating", "wrong_type", "has list in 'data', not a list of strings, user first"),
        ({"messages": "a"}, "messages", "wrong_type", "has str in 'messages', not a list of turns"),
        (
            {"messages": ONE_ANSWER_NULL},
            "messages",
            "wrong_type",
            "has no role and content (or from and value) of type str in turn 2; it has role (str), content (NoneType);",
        ),
        ({"messages": ["a"]}, "messages", "wrong_type", "in turn 1; it has str; mend"),
        (
            {"messages": [{"role": "assistants", "content": "a"}]},
            "messages",
            "bad_role",
            "has the role 'assistants' in turn 1. Did you mean 'assistant'?",
        ),
        ({"text": "a\ud800"}, "text", "surrogate", r"half of a UTF-16 pair (\ud800) at character 1 of text;"),
        ({"data": ["a", "\udfff"]}, "alternating", "surrogate", r"(\udfff) at character 0 of turn 2;"),
        ({"text": "a", "id": "\ud800"}, "text", "surrogate", r"(\ud800) at character 0 of id;"),
        ({"a\ud800": 1}, "text", "no_field", "it has a\\ud800; mend"),
        (
            {"text": "plain"},
            "llama2",
            "bad_marks",
            "has text before the first [INST]: 'plain', as data.x.format=llama2",
        ),
        ({"text": "<s>"}, "llama2", "bad_marks", "has no [INST] in its text"),
        ({"text": "[INST] a [INST] b"}, "llama2", "bad_marks", "has [INST] where [/INST] is due, after 1 marks"),
        ({"text": "plain"}, "human_assistant", "bad_marks", "has neither ### Human: nor ### Assistant: in its text"),
    ],
)
def test_bad_rows(fields, layout, reason, sentence):
    found = refused(fields, layout)
    assert (found.reason, found.is_bad_row) == (reason, True)
    assert re.search(re.escape(sentence), found.message)


def marked(*marks):
    """A conversation whose answers have these fields beside role and content."""
    turns = [
        [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}", **mark}]
        for i, mark in enumerate(marks)
    ]
    return {"messages": [turn for pair in turns for turn in pair]}


@pytest.mark.parametrize(
    "mark", [{"train": False}, {"training": False}, {"weight": 0}, {"weight": 0.0}, {"train": False, "weight": 0}]
)
def test_answers_marked_as_context(mark):
    found = document(marked(mark, {"train": None, "weight": 1}, mark, {"train": True}, mark), "messages")
    assert len(found.messages) == 8, "what follows the last learnt answer is left out"
    assert found.context == (1, 5)
    sharegpt = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", **mark}] * 2}
    sharegpt["conversations"][3] = {"from": "gpt", "value": "b", "weight": 1.0}
    assert document(sharegpt, "messages").context == (1,)


def test_marks_of_other_turns_say_nothing():
    said = [{"role": "system", "content": "s", "weight": 0}, {"role": "user", "content": "q", "train": False}]
    found = document({"messages": [*said, {"role": "assistant", "content": "a"}]}, "messages")
    assert found.context == ()


def test_a_conversation_of_context_teaches_nothing():
    found = refused(marked({"train": False}, {"weight": 0}), "messages")
    assert (found.reason, found.is_bad_row) == ("no_answer", False)


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ({"weight": 0.5}, "has weight: 0.5 in turn 2; an answer is learnt (weight: 1) or only read (weight: 0)"),
        ({"train": "no"}, 'has train: "no" in turn 2; an answer is learnt (train: true)'),
        ({"weight": True}, "has weight: true in turn 2"),
        ({"train": 0}, "has train: 0 in turn 2"),
        ({"train": True, "weight": 0}, "says both that turn 2 is learnt and that it is not"),
    ],
)
def test_marks_that_say_neither(mark, words):
    found = refused(marked(mark, {}), "messages")
    assert (found.reason, found.is_bad_row) == ("bad_mark", True)
    assert words in found.message


def test_prompts_and_completions():
    assert document({"prompt": "Q", "completion": "A"}, "prompt_completion").messages == turns("Q", "A")
    row = {"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}], "completion": "A"}
    assert document(row, "prompt_completion").messages == (("system", "S"), *turns("Q", "A"))
    row = {"prompt": "Q", "completion": [{"role": "assistant", "content": "A"}]}
    assert document(row, "prompt_completion").messages == turns("Q", "A")
    assert refused({"prompt": "Q", "completion": 3}, "prompt_completion").reason == "wrong_type"
    assert refused({"prompt": "Q"}, "prompt_completion").reason == "no_field"


def test_completions_that_are_marked_bad_are_never_learnt_by_chance():
    rows = [{"prompt": "Q", "completion": "A", "label": label} for label in (True, False)]
    assert all(refused(row, "prompt_completion").reason == "preference" for row in rows)
    assert document(rows[0], "prompt_completion", keep={"label": [True]}).messages == turns("Q", "A")
    left_out = refused(rows[1], "prompt_completion", keep={"label": [True]})
    assert (left_out.reason, left_out.is_bad_row) == ("not_kept", False)


def test_contents_in_parts():
    parts = [{"type": "text", "text": "O mare "}, {"type": "text", "text": "albastră."}]
    row = {"messages": [{"role": "user", "content": "Ce?"}, {"role": "assistant", "content": parts}]}
    assert document(row, "messages").messages == turns("Ce?", "O mare albastră.")
    row["messages"][0]["content"] = [{"type": "image", "url": "a.png"}]
    found = refused(row, "messages")
    assert (found.reason, found.is_bad_row) == ("not_text", True)
    assert "has a part of type 'image' in turn 1; only text is trained on" in found.message


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Iași"}'}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
USED = [
    {"role": "user", "content": "Vremea?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "ploaie"},
    {"role": "assistant", "content": "Plouă."},
]


def test_calls_that_are_marked_as_context():
    marked_call = {**USED[1], "train": False}
    found = document({"messages": [USED[0], marked_call, *USED[2:]]}, "messages")
    assert (found.context, bool(found.extras[1])) == ((1,), True)
    assert [found.is_taught(turn) for turn in range(4)] == [False, False, False, True]
    assert document({"messages": USED}, "messages").is_taught(1), "a call is an answer, although it has no text"
    found = refused({"messages": [USED[0], marked_call, USED[2], {**USED[3], "weight": 0}]}, "messages")
    assert found.reason == "no_answer"


def test_answers_of_a_prompt_are_context_and_those_of_a_completion_may_be():
    asked = [{"role": r, "content": c} for r, c in turns("Q1", "A1", "Q2")]
    told = [{"role": r, "content": c} for r, c in turns("A2", "Q3", "A3")]
    told = [turn | {"role": role} for turn, role in zip(told, ("assistant", "user", "assistant"), strict=True)]
    row = {"prompt": asked, "completion": told}
    assert document(row, "prompt_completion").context == (1,)
    told[0]["train"] = False
    assert document(row, "prompt_completion").context == (1, 3)
    found = document({"prompt": asked, "completion": "A2"}, "prompt_completion")
    assert (found.context, found.messages) == ((1,), turns("Q1", "A1", "Q2", "A2"))


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_calls_of_tools(tools):
    found = document({"messages": USED, "tools": tools}, "messages")
    assert found.messages == (("user", "Vremea?"), ("assistant", ""), ("tool", "ploaie"), ("assistant", "Plouă."))
    assert json.loads(found.tools) == [TOOL]
    called = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Iași"}}, "id": "c1"}
    assert [json.loads(extra) if extra else None for extra in found.extras] == [
        None,
        {"tool_calls": [called]},
        {"name": "weather", "tool_call_id": "c1"},
        None,
    ]
    assert len(document({"messages": USED[:2]}, "messages").messages) == 2, "a call is an answer"
    assert document({"messages": USED[:1] + USED[3:]}, "messages").extras == ()


def test_columns_of_a_table_have_nulls_where_a_call_has_no_argument():
    row = {
        "messages": [
            USED[0],
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Iași", "country": None}}}],
            },
        ]
    }
    spec = SourceSpec("x", "rows.parquet", kind="chat", format="messages")
    found = document_of(RawRow(row, "rows.parquet", "row", 1), spec=spec)
    assert "country" not in found.extras[1]
    found = document_of(RawRow(row, "rows.json", "row", 1), spec=spec)
    assert '"country": null' in found.extras[1]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"messages": [USED[0], {"role": "assistant", "tool_calls": [{"function": {}}]}]}, "bad_call"),
        ({"messages": [USED[0], {"role": "assistant", "tool_calls": [{"name": "a", "arguments": "x"}]}]}, "bad_call"),
        ({"messages": [USED[0], {"role": "assistant", "tool_calls": "no"}]}, "bad_call"),
        ({"messages": USED, "tools": "weather"}, "bad_tools"),
        ({"messages": USED, "tools": [{"type": "function"}]}, "bad_tools"),
    ],
)
def test_calls_that_are_not_of_a_function(changed, reason):
    found = refused(changed, "messages")
    assert (found.reason, found.is_bad_row) == (reason, True)


@pytest.mark.parametrize(
    ("value", "wanted", "is_kept"),
    [
        ("irac", ["irac", "statute"], True),
        ("client", ["irac", "statute"], False),
        (None, ["irac"], False),
        (1, [1], True),
        ("1", [1], True),
        (1, [True], False),
        ("true", [True], True),
        (["irac"], ["irac"], False),
    ],
)
def test_rows_are_kept_by_a_fields_values(value, wanted, is_kept):
    row = {"text": "a", "sample_type": value}
    if is_kept:
        assert document(row, "text", kind="text", keep={"sample_type": wanted}).text == "a"
        return
    found = refused(row, "text", kind="text", keep={"sample_type": wanted})
    assert (found.reason, found.is_bad_row) == ("not_kept", False)
    assert "which is not in data.x.keep.sample_type." in found.message


def test_a_field_that_keep_names_and_a_row_has_not():
    found = refused({"text": "a", "sample_type": "b"}, "text", kind="text", keep={"sampl_type": ["b"]})
    assert (found.reason, found.is_bad_row) == ("no_field", True)
    assert "Did you mean 'sample_type'?" in found.message
