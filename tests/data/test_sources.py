import json
import re

import pyarrow
import pyarrow.parquet
import pytest

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.documents import SourceSpec
from tpu_experiments.data.sources import read_documents

TEXTS = ["Bună ziua.", "Două\nrânduri", "„ghilimele” și ș ț"]


def read(path, **values):
    return list(read_documents(SourceSpec(**({"name": "x", "path": str(path)} | values))))


def complaint(path, **values):
    with pytest.raises(ConfigError) as caught:
        read(path, **values)
    assert str(caught.value).startswith(f"data.x.path={path}; ")
    return str(caught.value)


def jsonl(texts):
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)


def written(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("indent", [None, 1])
def test_every_format_gives_the_same_documents(tmp_path, indent):
    rows = [{"text": text} for text in TEXTS]
    array = json.dumps(rows, ensure_ascii=False, indent=indent)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    paths = {
        "line": [
            written(tmp_path, "a.jsonl", jsonl(TEXTS)),
            written(tmp_path, "blank.jsonl", "\n" + jsonl(TEXTS).replace("\n", "\n\n")),
            written(tmp_path, "bom.jsonl", b"\xef\xbb\xbf" + jsonl(TEXTS).encode()),
            written(tmp_path, "lines.json", jsonl(TEXTS)),
        ],
        "row": [
            written(tmp_path, "array.json", array),
            written(tmp_path, "bom.json", b"\xef\xbb\xbf" + array.encode()),
            tmp_path / "a.parquet",
        ],
    }
    for path in [*paths["line"], *paths["row"]]:
        assert [document.text for document in read(path)] == TEXTS, path
    assert [document.id for document in read(paths["row"][0])] == [
        "array.json:1",
        "array.json:2",
        "array.json:3",
    ]
    assert read(paths["line"][1])[0].id == "blank.jsonl:2"


def test_array_longer_than_a_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr("tpu_experiments.data.files.CHUNK_BYTES", 7)
    texts = ["ș" * length for length in (0, 1, 2, 3, 50, 1000)]
    rows = [{"text": text, "list": [1, {"a": "]},"}]} for text in texts]
    path = written(tmp_path, "a.json", json.dumps(rows, ensure_ascii=False))
    assert [document.text for document in read(path)] == texts


def test_folder_in_order_of_names(tmp_path):
    written(tmp_path, "b.jsonl", jsonl(["2"]))
    written(tmp_path, "a.json", json.dumps([{"text": "1"}]))
    written(tmp_path, "c/a.jsonl", jsonl(["3"]))
    written(tmp_path, ".cache/z.jsonl", jsonl(["hidden"]))
    written(tmp_path, "dataset_infos.json", "{}")
    written(tmp_path, "README.md", "# read me")
    documents = read(tmp_path)
    assert [document.text for document in documents] == ["1", "2", "3"]
    assert [document.id for document in documents] == ["a.json:1", "b.jsonl:1", "c/a.jsonl:1"]


def test_max_documents_reads_no_further(tmp_path):
    path = written(tmp_path, "a.jsonl", jsonl(TEXTS) + "broken\n")
    assert len(read(path, max_documents=3)) == 3


def test_missing_file_names_what_is_near(tmp_path):
    written(tmp_path, "wiki_ro.jsonl", jsonl(TEXTS))
    sentence = complaint(tmp_path / "wiki_or.jsonl")
    assert f"there is no such file or folder. Did you mean wiki_ro.jsonl in {tmp_path}?" in sentence
    assert "Point data.x.path= at a .jsonl, .json or .parquet file" in sentence


@pytest.mark.parametrize("path", ["./nowhere", "~/nowhere/at/all", "nowhere.parquet", "a/b.jsonl.gz"])
def test_missing_path_is_not_taken_for_a_hub_id(path):
    assert "there is no such file or folder" in complaint(path)


def test_missing_folder_is_said(tmp_path):
    sentence = complaint(tmp_path / "gone" / "a.jsonl")
    assert f"The folder {tmp_path / 'gone'} does not exist either." in sentence


def test_address():
    assert "addresses are not read; download" in complaint("gs://bucket/a.jsonl")


BROKEN = [
    ("a.csv", "text\na\n", "the suffix '.csv' is not supported; convert the file to .jsonl"),
    ("a.jsonl.gz", b"\x1f\x8b", "compressed files (.gz) are not supported yet; unpack it"),
    ("a.jsonl", "", "it is empty: 0 documents were read"),
    ("a.json", "", "it is empty: 0 documents were read"),
    ("a.json", " [ ] ", "it is empty: 0 documents were read"),
    (
        "a.jsonl",
        jsonl(["a"]) + '{"text": "b"\n' + jsonl(["c"]),
        "line 2 of a.jsonl is not JSON: Expecting ',' delimiter",
    ),
    ("a.jsonl", jsonl(["a"]) + "[1]\n", "line 2 of a.jsonl is a JSON list, not an object"),
    (
        "a.jsonl",
        jsonl(["a"]).encode() + b'{"text": "\xe9t\xe9"}\n',
        "line 2 of a.jsonl is not UTF-8: byte 0xe9 at byte 11 of the line",
    ),
    (
        "a.json",
        b'[\n{"text": "a"},\n{"text": "\xe9t\xe9"}]',
        "line 3 of a.json is not UTF-8: byte 0xe9",
    ),
    ("a.json", '"text"', "a.json is neither a JSON array of objects nor one object a line"),
    ("a.json", '{\n "text": "a"\n}\n', "a.json is neither a JSON array of objects nor one object"),
    ("a.json", jsonl(["a"]) + "{\n", "line 2 of a.json is not JSON: Expecting property name"),
    ("a.json", '[{"text": "a"}, 3]', "row 2 of a.json is a JSON int, not an object"),
    ("a.json", '[{"text": "a"}, {"text" 3}]', "row 2 of a.json is not JSON: Expecting ':'"),
    ("a.json", '[{"text": "a"} {"text": "b"}]', "expected , or ] after it but found '{'"),
    ("a.json", '[{"text": "a"}', "expected , or ] after it but found ''"),
    ("a.json", '[{"text": "a"}][{"text": "b"}]', "row 1 of a.json is not JSON: more follows"),
    ("a.parquet", "PAR1", "a.parquet is not a readable parquet file after 0 rows:"),
]


@pytest.mark.parametrize(("name", "content", "sentence"), BROKEN)
def test_broken_file(tmp_path, name, content, sentence):
    assert re.search(re.escape(sentence), complaint(written(tmp_path, name, content)))


def test_folder_without_data(tmp_path):
    written(tmp_path, "data.arrow", "")
    sentence = complaint(tmp_path)
    assert "holds no .jsonl, .json or .parquet file among its 1 files (data.arrow)" in sentence


class TestHub:
    def test_rows_are_streamed(self, monkeypatch):
        asked = []

        def load_dataset(*arguments, **options):
            asked.append((arguments, options))
            return iter([{"id": "7", "text": "a"}, {"id": None, "text": "b"}])

        monkeypatch.setattr("datasets.load_dataset", load_dataset)
        documents = read("org/set", hub_config="20231101.ro", revision="abc")
        assert [document.id for document in documents] == ["7", "org/set:2"]
        arguments, options = asked[0]
        assert arguments == ("org/set", "20231101.ro")
        assert options == {"split": "train", "revision": "abc", "streaming": True}

    def test_out_of_reach(self, monkeypatch):
        def load_dataset(*arguments, **options):
            raise ConnectionError("Couldn't reach 'org/set' on the Hub (LocalEntryNotFoundError)")

        monkeypatch.setattr("datasets.load_dataset", load_dataset)
        sentence = complaint("org/set")
        assert "(hub_config=None, hub_split=train, revision=None) after 0 rows:" in sentence
        assert "ConnectionError: Couldn't reach 'org/set' on the Hub" in sentence
        assert "download the data and point data.x.path= at its folder" in sentence

    def test_cause_is_chained_when_it_breaks_on_the_way(self, monkeypatch):
        def rows():
            yield {"text": "a"}
            raise OSError("connection reset")

        monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: rows())
        with pytest.raises(ConfigError, match="after 1 rows: OSError: connection reset;") as caught:
            read("org/set")
        assert isinstance(caught.value.__cause__, OSError)

    def test_error_in_a_row_is_not_the_hubs(self, monkeypatch):
        monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: iter([{"body": "a"}]))
        assert "row 1 of org/set has no field 'text'" in complaint("org/set")


@pytest.mark.parametrize(
    ("name", "layout", "count"),
    [
        ("ro_text.jsonl", "text", 814),
        ("ro_chat.jsonl", "alternating", 240),
        ("uk_law.jsonl", "question_answer", 455),
        ("chat_messages.jsonl", "messages", 613),
    ],
)
def test_development_data(shared_data, name, layout, count):
    documents = read(shared_data / name, format=layout)
    assert len(documents) == count
    assert not any(document.is_empty for document in documents)
