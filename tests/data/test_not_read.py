"""Fields that were not read are counted by rows: in the manifest, the log, the table and the page, and in no hash."""

import json
import logging

import pytest

from tests.data.preparing import chat_source, digests, prepared, text_source, write_lines
from tests.data.readers import read
from tests.tiers import only
from tpu_experiments.data.audit.page import audit_pages
from tpu_experiments.data.audit.summary import audit_hash, audit_table, not_read_text
from tpu_experiments.data.documents import Document
from tpu_experiments.data.steps import blocks as blocks_module
from tpu_experiments.data.steps import keys as keys_module
from tpu_experiments.data.steps.blocks import NAMES_COUNTED, OTHER_NAMES, most_common, write_documents
from tpu_experiments.data.steps.keys import content_of_documents

COUNTS = {"id": 100, "messages[].score": 50, "source": 34}


def rows():
    """100 conversations, of which every second has a score in its answer, and every third says where it is from."""
    for i in range(100):
        answer = {"role": "assistant", "content": f"Răspunsul {i}.", **({"score": i} if i % 2 else {"score": None})}
        beside = {"source": "web"} if i % 3 == 0 else {}
        yield {"id": i, "messages": [{"role": "user", "content": f"Întrebarea {i}?"}, answer], **beside}


@pytest.fixture
def chats(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks_module, "BLOCK_ROWS", 16)
    return write_lines(tmp_path / "a.jsonl", rows())


@pytest.mark.parametrize("workers", only(["2"], [1, 2]))
def test_counts_are_the_same_after_a_kill_and_with_other_workers(tmp_path, chats, tokenizer, workers):
    def made(folder, **settings):
        [source] = prepared({"a": chat_source(chats)}, folder=folder, tokenizer=tokenizer, **settings).values()
        return source.manifests[64], digests(folder)

    manifest, whole = made(tmp_path / "whole", workers=1)
    assert manifest["not_read"] == COUNTS
    assert made(tmp_path / "cut", workers=workers)[1] == whole
    for marker in [*sorted((tmp_path / "cut").rglob("*.index.safetensors"))[::2], *(tmp_path / "cut").rglob("*.json")]:
        marker.unlink()
    again, bytes_again = made(tmp_path / "cut", workers=workers)
    assert (again["not_read"], bytes_again) == (COUNTS, whole)


def test_they_are_said_once_and_shown(tmp_path, chats, tokenizer, caplog):
    caplog.set_level(logging.INFO)
    for _ in range(2):  # made, and found again
        caplog.clear()
        source = prepared({"a": chat_source(chats)}, folder=tmp_path / "p", tokenizer=tokenizer, seq_lens=(64, 128))[
            "a"
        ]
        said = [record.getMessage() for record in caplog.records if "not read" in record.getMessage()]
        assert said == ["data.a: not read: id 100, messages[].score 50, source 34"]
    manifests = list(source.manifests.values())
    assert "  not read          id 100, messages[].score 50, source 34\n" in audit_table(manifests)
    pages = audit_pages(manifests, stores={}, tokenizer=tokenizer, name="x")
    assert "id 100, messages[].score 50, source 34" in pages["x.html"]


def test_nothing_is_said_where_everything_is_read(tmp_path, tokenizer, caplog):
    caplog.set_level(logging.INFO)
    path = write_lines(tmp_path / "a.jsonl", [{"text": f"Un text, al {i}-lea."} for i in range(40)])
    source = prepared({"a": text_source(path)}, folder=tmp_path / "p", tokenizer=tokenizer)["a"]
    assert source.manifests[64]["not_read"] == {}
    assert "not read" not in caplog.text + audit_table(list(source.manifests.values()))


def test_they_change_no_document_and_no_hash(tmp_path, tokenizer):
    plain = [{"messages": row["messages"]} for row in rows()]
    found = []
    for name, lines in (("plain", plain), ("more", [row | {"url": "u"} for row in plain])):
        path = write_lines(tmp_path / name / "a.jsonl", lines)
        [source] = prepared({"a": chat_source(path)}, folder=tmp_path / name / "p", tokenizer=tokenizer).values()
        found.append(source.manifests[64])
    assert found[0]["not_read"] != found[1]["not_read"]
    assert audit_hash(found[0]) == audit_hash(found[1])


def test_the_content_of_an_own_reader_is_its_documents():
    def content(**values):
        return content_of_documents(lambda: iter([Document("1", text="a", **values)]))

    assert content(unread=("source",)) == content()
    assert content(label="b") != content()


def test_data_of_earlier_reading_rules_is_not_used(tmp_path, tokenizer, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", rows())
    folders = set()
    for version in (keys_module.CHAT_VERSION, keys_module.CHAT_VERSION + 1):
        monkeypatch.setattr(keys_module, "CHAT_VERSION", version)
        source = prepared({"a": chat_source(path)}, folder=tmp_path / "p", tokenizer=tokenizer)["a"]
        folders.add(source.folders[64])
    assert len(folders) == 2


def test_rows_with_names_of_their_own_keep_the_record_small():
    counts = {f"day {i:03}": i for i in range(300)}
    found = most_common(counts)
    assert len(found) == NAMES_COUNTED + 1
    assert found[OTHER_NAMES] == sum(range(300 - NAMES_COUNTED))
    assert most_common(found) == found
    assert sum(found.values()) == sum(counts.values())
    assert not_read_text({"not_read": found}).endswith("and 81 more")
    assert most_common({"b": 1, "a": 1}) == {"a": 1, "b": 1}


def test_names_of_a_file_do_not_reach_the_terminal(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row | {"\x1b[31m": 1, "\ud800": 1}) + "\n" for row in rows()))
    source = prepared({"a": chat_source(path)}, folder=tmp_path / "p", tokenizer=tokenizer)["a"]
    assert "\x1b" not in audit_table(list(source.manifests.values()))


def test_kept_documents_are_read_back_with_what_stands_beside_their_contents(tmp_path):
    call = {"type": "function", "function": {"name": "vreme", "arguments": {"oras": "Iași", "zi": None}}}
    extras = (
        "",
        json.dumps({"reasoning_content": "Fiindcă.", "tool_calls": [call]}, ensure_ascii=False),
        '{"name": "vreme"}',
        "",
    )
    told = (("user", "Vremea?"), ("assistant", ""), ("tool", "12"), ("assistant", "12 grade."))
    tools = json.dumps([{"type": "function", "function": {"name": "vreme", "parameters": {}}}])
    document = Document("7", messages=told, context=(1,), extras=extras, tools=tools)
    write_documents([document], folder=str(tmp_path), name="a", source="x")
    [found] = read(tmp_path / "a.parquet", kind="chat", format="auto")
    assert found.content == document.content
    assert (found.id, found.unread) == ("7", ("id", "source"))


def test_rows_that_differ_in_their_system_text_alone_are_all_kept(tmp_path, tokenizer):
    told = [{"from": "human", "value": "Cine ești?"}, {"from": "gpt", "value": "Sunt un asistent."}]
    lines = [{"system": f"Ești asistentul firmei {i}.", "conversations": told} for i in range(6)]
    path = write_lines(tmp_path / "a.jsonl", [*lines, lines[0] | {"id": 6}])
    source = chat_source(path, eval_fraction=0.0, test_fraction=0.0)
    [found] = prepared({"a": source}, folder=tmp_path / "p", tokenizer=tokenizer)["a"].manifests.values()
    assert found["documents_reported"] == {"exact_duplicate": 1}
    assert found["documents_out"] == 6
