"""Documents of whole sources: every kind of file, folders, real data."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from tests.conftest import SHARED_DATA
from tests.data.readers import TEXTS, jsonl, read, recognised, spec_for, split_rows, texts_of, written
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.documents import Refused, raise_if_bad


@pytest.mark.parametrize("indent", [None, 1])
def test_every_format_gives_the_same_documents(tmp_path, indent):
    rows = [{"text": text} for text in TEXTS]
    array = json.dumps(rows, ensure_ascii=False, indent=indent)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    paths = {
        "line": [
            written(tmp_path, "a.jsonl", jsonl(TEXTS)),
            written(tmp_path, "blank.jsonl", "\n" + jsonl(TEXTS).replace("\n", "\n \r\n")),
            written(tmp_path, "bom.jsonl", b"\xef\xbb\xbf" + jsonl(TEXTS).encode()),
            written(tmp_path, "open.jsonl", jsonl(TEXTS).rstrip()),
            written(tmp_path, "lines.json", jsonl(TEXTS)),
        ],
        "row": [
            written(tmp_path, "array.json", array),
            written(tmp_path, "bom.json", b"\xef\xbb\xbf" + array.encode()),
            tmp_path / "a.parquet",
        ],
    }
    for path in [*paths["line"], *paths["row"]]:
        assert texts_of(path) == TEXTS, path
    assert [row.id for row in read(paths["row"][0])] == ["array.json:1", "array.json:2", "array.json:3"]
    first = read(paths["line"][1])[0]
    assert (first.id, first.place) == ("blank.jsonl:2", "line 2 of blank.jsonl")


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


def test_max_documents_counts_rows_and_reads_no_further(tmp_path):
    path = written(tmp_path, "a.jsonl", "broken\n" + jsonl(TEXTS))
    documents, refused = split_rows(path, max_documents=3)
    assert ([document.text for document in documents], len(refused)) == (TEXTS[:2], 1)


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", ""), ("a.json", ""), ("a.json", " [ ] "), ("a.csv", "text\n")]
)
@pytest.mark.parametrize("layout", ["text", "auto"])
def test_empty_source(tmp_path, name, content, layout):
    with pytest.raises(ConfigError, match="it is empty: 0 documents were read"):
        read(written(tmp_path, name, content), format=layout)


def test_a_bad_row_stops_or_is_left_out(tmp_path):
    path = written(tmp_path, "a.jsonl", jsonl(["a"]) + "broken\n" + jsonl([" "]))
    refused = [row for row in read(path) if isinstance(row, Refused)]
    assert [(row.reason, row.is_bad_row) for row in refused] == [("not_json", True), ("empty", False)]
    with pytest.raises(ConfigError, match=r"data\.x\.path=.*; line 2 of a\.jsonl is not JSON: .*on_bad_row=skip"):
        raise_if_bad(refused[0], spec=spec_for(path))
    raise_if_bad(refused[0], spec=spec_for(path, on_bad_row="skip"))
    raise_if_bad(refused[1], spec=spec_for(path))


FORMAT_OF = {
    "ro_text.jsonl": ("text", "text", 814),
    "ro_chat.jsonl": ("chat", "alternating", 240),
    "uk_law.jsonl": ("chat", "question_answer", 455),
    "chat_messages.jsonl": ("chat", "messages", 613),
    "instruct_en.jsonl": ("chat", "instruction", 1250),
}


@pytest.mark.parametrize("name", FORMAT_OF)
def test_real_data_is_recognised_and_every_row_counted(shared_data, name):
    kind, layout, count = FORMAT_OF[name]
    path = shared_data / name
    assert recognised(spec_for(path, kind=kind, format="auto")).format == layout
    documents, refused = split_rows(path, kind=kind, format="auto")
    assert (len(documents), len(refused)) == (count, 0)
    assert not any(document.is_empty for document in documents)
    assert len({document.id for document in documents}) == count


def test_no_real_file_is_forgotten(shared_data):
    assert shared_data == SHARED_DATA
    assert {path.name for path in shared_data.glob("*.jsonl")} == set(FORMAT_OF)
