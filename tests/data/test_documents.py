from pathlib import Path

import pytest

from tpu_experiments.config.data_schema import DataSourceConfig
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.documents import Document, spec_of

SAMPLE = "tpu_experiments/samples/wiki_ro.jsonl"


def source(**values):
    return DataSourceConfig(**({"path": "a/b", "kind": "text", "format": "text"} | values))


def test_sample_path_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = spec_of("wiki", source(sample_path=SAMPLE), data_size="sample")
    assert Path(spec.path).is_file()
    assert spec.name == "wiki"


def test_working_folder_comes_before_the_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tpu_experiments" / "samples").mkdir(parents=True)
    (tmp_path / SAMPLE).write_text('{"text": "a"}\n')
    assert spec_of("wiki", source(path=SAMPLE), data_size="full").path == SAMPLE


def test_hub_id_stays_as_it_is():
    spec = spec_of("wiki", source(path="wikimedia/wikipedia", revision="abc"), data_size="full")
    assert (spec.path, spec.revision, spec.hub_split) == ("wikimedia/wikipedia", "abc", "train")


def test_missing_sample():
    with pytest.raises(ConfigError, match=r"data\.wiki\.sample_path is not set; set it"):
        spec_of("wiki", source(), data_size="sample")


def test_kind_and_format_must_agree():
    with pytest.raises(ConfigError, match=r"data\.x\.format=messages with data\.x\.kind=text; .*chat"):
        spec_of("x", source(format="messages"), data_size="full")


def test_document_is_a_text_or_a_conversation():
    with pytest.raises(AssertionError):
        Document("1")
    with pytest.raises(AssertionError):
        Document("1", text="a", messages=(("user", "b"),))


@pytest.mark.parametrize("document", [Document("1", text=" \n"), Document("1", messages=())])
def test_empty(document):
    assert document.is_empty


def test_content_leaves_the_id_out():
    turns = (("user", "a"), ("assistant", "b"))
    assert Document("1", messages=turns).content == Document("2", messages=turns).content
    assert Document("1", text="a").content == "a"
    marked = Document("1", messages=turns, context=(1,))
    assert marked.content != Document("1", messages=turns).content, "they teach different things"
    assert Document("1", messages=turns, tools="[]").content not in (
        marked.content,
        Document("1", messages=turns).content,
    )
