"""format: auto."""

import json

import pytest

from tests.data.readers import jsonl, read, recognised, spec_for, split_rows, written
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.reading.locations import SourceFile
from tpu_experiments.data.reading.sources import SourceRows

CHAT = [
    ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
    ({"conversations": [{"from": "human", "value": "a"}]}, "messages"),
    ({"data": [{"role": "user", "content": "a"}]}, "messages"),
    ({"data": ["a", "b"]}, "alternating"),
    ({"question": "a", "answer": "b"}, "question_answer"),
    ({"instruction": "a", "output": "b"}, "instruction"),
    ({"instruction": "a", "context": "", "response": "b"}, "instruction"),
    ({"prompt": "a", "completion": "b"}, "prompt_completion"),
    ({"prompt": [{"role": "user", "content": "a"}], "completion": []}, "prompt_completion"),
    ({"text": "<s>[INST] a [/INST] b </s>"}, "llama2"),
    ({"text": "### Human: a### Assistant: b"}, "human_assistant"),
]


def resolved(tmp_path, rows, **values):
    path = written(tmp_path, "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return recognised(spec_for(path, **{"format": "auto"} | values))


def complaint(tmp_path, rows, **values):
    with pytest.raises(ConfigError) as caught:
        resolved(tmp_path, rows, **values)
    return str(caught.value)


@pytest.mark.parametrize(("row", "layout"), CHAT)
def test_conversations(tmp_path, row, layout):
    assert resolved(tmp_path, [row] * 3, kind="chat").format == layout


@pytest.mark.parametrize(("row", "layout"), CHAT[:-2])
def test_conversations_are_not_texts(tmp_path, row, layout):
    sentence = complaint(tmp_path, [row])
    assert (
        f"data.x.kind=text; the rows of {tmp_path}/a.jsonl are conversations ({layout}); set data.x.kind=chat"
        in sentence
    )


def test_texts(tmp_path):
    assert resolved(tmp_path, [{"text": "a", "url": "b"}]).format == "text"
    assert resolved(tmp_path, [{"body": "a", "url": "b"}], fields={"text": "body"}).format == "text"
    assert "the rows of" in (sentence := complaint(tmp_path, [{"text": "a"}], kind="chat"))
    assert "are plain text; set data.x.kind=text" in sentence


@pytest.mark.parametrize(
    ("name", "content"), [("a.csv", "body\nunu\n"), ("a.txt", "unu\n"), ("a.tsv", "text\tid\nunu\t1\n")]
)
def test_tables_and_lines(tmp_path, name, content):
    assert [row.text for row in read(written(tmp_path, name, content), format="auto")] == ["unu"]


def test_a_chat_in_text_may_be_read_as_text(tmp_path):
    assert resolved(tmp_path, [CHAT[-1][0]]).format == "text"


def test_unknown_fields_are_named(tmp_path):
    sentence = complaint(tmp_path, [{"content": "a", "url": "b"}])
    assert "have the fields content, url, which is no known format" in sentence
    assert "set data.x.format= to one of text, and data.x.fields= where" in sentence
    assert "one of messages, alternating, question_answer, instruction, prompt_completion, llama2" in complaint(
        tmp_path, [{"content": "a"}], kind="chat"
    )


TURN = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
PAIRS = [
    ({"chosen": [TURN, ANSWER], "rejected": [TURN]}, {"messages": "chosen"}, "chat"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"completion": "chosen"}, "chat"),
    ({"prompt": [TURN], "chosen": [ANSWER], "rejected": [ANSWER]}, {"completion": "chosen"}, "chat"),
    ({"prompt": "a", "chosen": [TURN, ANSWER], "rejected": [TURN]}, {"messages": "chosen"}, "chat"),
    ({"chosen": "Human: a Assistant: b", "rejected": "c"}, {"text": "chosen"}, "text"),
]


@pytest.mark.parametrize(("row", "fields", "kind"), PAIRS)
def test_preference_pairs_are_read_only_where_a_key_says_which(tmp_path, row, fields, kind):
    (field,) = fields
    sentence = complaint(tmp_path, [row], kind=kind)
    assert "its rows are preference pairs (chosen and rejected answers); data.x.kind=preference" in sentence
    assert f"'data.x.fields={{{field}: chosen}}' with data.x.kind={kind} reads the chosen ones" in sentence
    path = written(tmp_path, "pairs.jsonl", json.dumps(row) + "\n")
    [document] = read(path, kind=kind, format="auto", fields=fields)
    assert "c" not in [document.text, *(content for _, content in document.messages or ())]


def test_chosen_turns_apart_from_their_conversation_are_not_offered_as_messages(tmp_path):
    row = {"conversations": [TURN], "chosen": ANSWER, "rejected": ANSWER}
    sentence = complaint(tmp_path, [row], kind="chat")
    assert "add the chosen turn to its conversation and remove both fields" in sentence
    assert "fields=" not in sentence


def test_other_fields_of_preference_pairs_are_read_by_name(tmp_path):
    row = {"messages": [TURN, ANSWER], "chosen": [TURN, ANSWER], "rejected": [TURN]}
    assert "are preference pairs" in complaint(tmp_path, [row], kind="chat")
    path = written(tmp_path, "pairs.jsonl", json.dumps(row) + "\n")
    [document] = read(path, kind="chat", format="messages")
    assert document.messages == (("user", "a"), ("assistant", "b"))


@pytest.mark.parametrize(
    ("row", "layout"),
    [
        ({"messages": json.dumps([TURN, ANSWER])}, "messages"),
        ({"data": json.dumps(["a", "b"])}, "alternating"),
        ({"Question": "a", "Answer": "b"}, "question_answer"),
        ({"instruction": "a", "output": 4}, "instruction"),
        ({"question": "a", "answer": ["b"]}, "question_answer"),
        ({"prompt": "a", "completion": 4}, "prompt_completion"),
        ({"messages": {"role": "user"}}, "messages"),
    ],
)
def test_near_misses_in_types_are_read_or_named(tmp_path, row, layout):
    assert resolved(tmp_path, [row], kind="chat").format == layout
    documents, refused = split_rows(written(tmp_path, "b.jsonl", json.dumps(row) + "\n"), kind="chat", format="auto")
    if isinstance(next(reversed(row.values())), str):
        assert documents[0].messages == (("user", "a"), ("assistant", "b"))
    else:
        name, value = next(reversed(row.items()))
        assert refused[0].message.startswith(f"has {type(value).__name__} in {name!r}, not a ")
        assert f"as data.x.format={layout} needs" in refused[0].message


def test_a_number_as_text_is_named(tmp_path):
    _, [refused] = split_rows(written(tmp_path, "a.jsonl", '{"text": 3, "url": "b"}\n'), format="auto")
    assert refused.message.startswith("has int in 'text', not a string")


def test_a_table_with_conversations_as_json_is_read(tmp_path):
    cell = json.dumps([TURN, ANSWER]).replace('"', '""')
    path = written(tmp_path, "a.csv", f'id,messages\n0,"{cell}"\n')
    [document] = read(path, kind="chat", format="auto")
    assert (document.messages, document.unread) == ((("user", "a"), ("assistant", "b")), ("id",))


def test_a_table_of_pythons_notation_is_refused(tmp_path):
    path = written(tmp_path, "a.csv", f'messages\n"{[TURN, ANSWER]}"\n')
    _, [refused] = split_rows(path, kind="chat", format="auto")
    assert refused.message.startswith("has str in 'messages', not a list of turns or its JSON")


def test_a_field_may_be_left_unread_in_any_format(tmp_path):
    row = {"text": "a", "images": ["b"], "any": 1}
    found = resolved(tmp_path, [row], fields={"images": "", "no_such": ""})
    assert found.format == "text"
    chats = {"system": "s", "history": "h", "tools": "t", "reasoning": "r", "id": "i"}
    assert resolved(tmp_path, [{"messages": [TURN, ANSWER]}], kind="chat", fields=chats).fields == chats


def test_rows_of_several_formats(tmp_path):
    sentence = complaint(tmp_path, [CHAT[0][0], CHAT[3][0]], kind="chat")
    assert "the first 2 rows are of several formats, alternating, messages; choose one" in sentence


def test_bad_rows_are_left_to_the_reader(tmp_path):
    path = written(tmp_path, "a.jsonl", "broken\n" + json.dumps({"body": 1}) + "\n" + jsonl(["a"]))
    documents, refused = split_rows(path, format="auto")
    assert [document.text for document in documents] == ["a"]
    assert [row.reason for row in refused] == ["not_json", "no_field"]


def test_nothing_readable(tmp_path):
    path = written(tmp_path, "a.jsonl", "broken\n" * 5)
    with pytest.raises(ConfigError, match=r"none of its first rows can be read; line 1 of a\.jsonl is not JSON"):
        read(path, format="auto")


def test_a_format_that_is_named_stays_and_nothing_is_read(tmp_path):
    spec = spec_for(tmp_path / "nowhere.jsonl", kind="chat", format="messages")
    assert SourceRows(spec, files=[SourceFile("none.jsonl", spec.path)]).resolve_format() == spec


def test_renamed_fields_must_be_the_formats(tmp_path):
    sentence = complaint(tmp_path, [{"text": "a"}], fields={"txt": "body"}, format="text")
    assert "data.x.fields={'txt': 'body'}; format text has no field 'txt'. Did you mean 'text'?" in sentence
    renamed = {"input": "i", "topic": "t"}
    assert "format instruction has no field 'topic'" in complaint(tmp_path, [], fields=renamed, format="instruction")
