import json
import logging
import re

import numpy as np
import pytest

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.sources import DataSourceConfig
from tpu_experiments.data.documents import Document
from tpu_experiments.data.prepare import prepare
from tpu_experiments.data.sources import read_documents
from tpu_experiments.data.split import is_held_out

SAMPLES = "tpu_experiments/samples"


def text_source(path, **values):
    return DataSourceConfig(path=str(path), kind="text", format="text", **values)


def chat_source(path, **values):
    return DataSourceConfig(path=str(path), kind="chat", format="alternating", **values)


def prepared(sources, *, tokenizer, seq_lens=(64,), data_size="full", read=None):
    return prepare(
        sources,
        data_size=data_size,
        tokenizer=tokenizer,
        seq_lens=seq_lens,
        read=read or (lambda name, spec: read_documents(spec)),
    )


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"Acesta este documentul {i}."}) for i in range(100)]
    path.write_text("\n".join(lines))
    return path


def test_every_document_is_on_one_side(texts, tokenizer):
    source = prepared({"a": text_source(texts)}, tokenizer=tokenizer)["a"]
    assert (source.name, source.kind, source.num_documents) == ("a", "text", 100)
    sides = {
        side: tokenizer.decode(rows[64].ids_NT.ravel(), skip_special_tokens=True)
        for side, rows in (("train", source.train), ("evaluation", source.evaluation))
    }
    for i in range(100):
        text = f"Acesta este documentul {i}."
        held_out = is_held_out(text, eval_fraction=0.1)
        assert (text in sides["evaluation"], text in sides["train"]) == (held_out, not held_out)


def test_every_length_once_and_the_same_twice(texts, tokenizer):
    first, second = (
        prepared({"a": text_source(texts)}, tokenizer=tokenizer, seq_lens=[32, 128, 32])["a"] for _ in range(2)
    )
    assert list(first.train) == list(first.evaluation) == [32, 128]
    for length, rows in first.train.items():
        assert rows.seq_len == length
        assert np.array_equal(rows.ids_NT, second.train[length].ids_NT)
    assert first.train[32].num_tokens == first.train[128].num_tokens


def test_dropped_are_counted_and_logged(tmp_path, tokenizer, caplog):
    path = tmp_path / "a.json"
    rows = [{"data": ["întrebare " * 40, f"răspuns {i}"]} for i in range(40)]
    path.write_text(json.dumps([*rows, {"data": ["singur"]}, {"data": []}]))
    caplog.set_level(logging.INFO, logger="tpu_experiments.data.prepare")
    source = prepared({"a": chat_source(path)}, tokenizer=tokenizer, seq_lens=[32])["a"]
    assert source.num_documents == 42
    assert source.num_dropped["empty_documents"] == 2
    assert source.num_dropped["unlearnable_pieces@32"] > 0
    kept = [n for side in (source.train, source.evaluation) for n in [side[32].num_supervised]]
    assert min(kept) > 0
    (message,) = caplog.messages
    assert re.match(r"data\.a: 42 documents \(\d+ held out, 2 empty\) -> \d+ rows of 32", message)


def test_shipped_samples(tokenizer):
    sources = {
        "wiki": text_source("org/none", sample_path=f"{SAMPLES}/wiki_ro.jsonl"),
        "chat": chat_source("org/none", sample_path=f"{SAMPLES}/ultrachat_ro.json"),
        "law": DataSourceConfig(
            path="org/none",
            sample_path=f"{SAMPLES}/uk_law.jsonl",
            kind="chat",
            format="question_answer",
        ),
    }
    result = prepared(sources, tokenizer=tokenizer, seq_lens=[128, 512], data_size="sample")
    assert list(result) == ["wiki", "chat", "law"]
    for source in result.values():
        assert source.num_dropped["empty_documents"] == 0
        for length in (128, 512):
            assert source.train[length].num_rows > source.evaluation[length].num_rows > 0
            assert source.train[length].ids_NT.max() < 4096


def test_no_bar_when_stderr_is_no_terminal(texts, tokenizer, capfd):
    prepared({"a": text_source(texts)}, tokenizer=tokenizer)
    assert capfd.readouterr().err == ""


def test_own_reader(tokenizer):
    def read(name, spec):
        assert (name, spec.name, spec.path) == ("a", "a", "org/none")
        return (Document(str(i), text=f"documentul {i}") for i in range(50))

    result = prepared({"a": text_source("org/none")}, tokenizer=tokenizer, read=read)
    assert result["a"].num_documents == 50


def test_reader_without_documents(tokenizer):
    with pytest.raises(ConfigError, match=r"data\.a\.path=org/none; it is empty: 0 documents"):
        prepared({"a": text_source("org/none")}, tokenizer=tokenizer, read=lambda *_: iter(()))


def test_nothing_held_out(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "unu"}\n{"text": "doi"}\n')
    sentence = r"data\.a\.eval_fraction=0\.001; no row was held out \(2 documents .* 0 held out\); r"
    with pytest.raises(ConfigError, match=sentence):
        prepared({"a": text_source(path, eval_fraction=0.001)}, tokenizer=tokenizer)
    source = prepared({"a": text_source(path, eval_fraction=0)}, tokenizer=tokenizer)["a"]
    assert source.evaluation[64].num_rows == 0


def test_nothing_to_train_on(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "unu"}\n{"text": "doi"}\n{"text": " "}\n')
    sentence = r"no row is left to train on \(3 documents were read, 1 of them empty, 2 held out\)"
    with pytest.raises(ConfigError, match=sentence):
        prepared({"a": text_source(path, eval_fraction=0.999999)}, tokenizer=tokenizer)


def test_conversation_without_answer_names_the_document(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "d7", "messages": [{"role": "user", "content": "?"}]}\n')
    source = DataSourceConfig(path=str(path), kind="chat", format="messages")
    with pytest.raises(ConfigError, match=r"^data\.a; document d7 has no assistant turn to learn"):
        prepared({"a": source}, tokenizer=tokenizer)
