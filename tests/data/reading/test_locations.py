"""What a configured path names: files, folders, patterns, URLs, else a Hub id; and the sentences when it names none."""

import uuid

import fsspec
import pytest

from tests.data.readers import TEXTS, jsonl, spec_for, texts_of, written
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.reading.files import fingerprint
from tpu_experiments.data.reading.locations import SUPPORTED, SourceFile, list_files

ASK = (
    "Point data.x.path= at a .jsonl, .ndjson, .json, .parquet, .csv, .tsv or .txt file, a folder of them, or a Hub id."
)


def names(path):
    return [file.name for file in list_files(spec_for(path))]


def complaint(path):
    with pytest.raises(ConfigError) as caught:
        list_files(spec_for(path))
    assert str(caught.value).startswith(f"data.x.path={path}; ")
    return str(caught.value)


@pytest.fixture
def folder(tmp_path):
    for name in ("b.jsonl", "a-10.json.gz", "a-2.csv", "sub/c.TXT", "sub/deep/b.jsonl", ".cache/z.jsonl", "README.md"):
        written(tmp_path, f"set/{name}", jsonl(["a"]))
    return tmp_path / "set"


@pytest.fixture
def memory():
    base = f"memory://{uuid.uuid4().hex}"
    for name in ("a.jsonl", "sub/b.jsonl", "sub/.hidden.jsonl", "sub/README.md"):
        with fsspec.open(f"{base}/{name}", "wb") as file:
            file.write(jsonl([name]).encode())
    return base


def test_file_and_folder(folder):
    assert list_files(spec_for(folder / "b.jsonl")) == [SourceFile("b.jsonl", str(folder / "b.jsonl"))]
    assert names(folder) == ["a-10.json.gz", "a-2.csv", "b.jsonl", "sub/c.TXT", "sub/deep/b.jsonl"]
    assert names(f"file://{folder}/b.jsonl") == ["b.jsonl"]


def test_patterns(folder):
    assert names(folder / "*.jsonl") == ["b.jsonl"]
    assert names(folder / "**" / "*.jsonl") == ["b.jsonl", "sub/deep/b.jsonl"]
    assert names(folder / "*") == ["a-10.json.gz", "a-2.csv", "b.jsonl"]
    assert names(folder / "s*b" / "c.*") == ["sub/c.TXT"]
    assert names(folder / "a-?.csv") == ["a-2.csv"]
    assert ASK in (sentence := complaint(folder / "*.tsv"))
    assert "no file matches. " in sentence


def test_a_file_with_a_pattern_in_its_name_is_that_file(folder):
    written(folder, "a[1].jsonl", jsonl(["a"]))
    assert names(folder / "a[1].jsonl") == ["a[1].jsonl"]


def test_working_folder_comes_before_the_repository(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert names("tpu_experiments/samples/wiki_ro.jsonl") == ["wiki_ro.jsonl"]
    assert names("tpu_experiments/samples/wiki*") == ["wiki_ro.jsonl"]
    assert names("set/*.csv") == ["a-2.csv"]
    written(tmp_path, "tpu_experiments/samples/wiki_a.jsonl", "")
    assert names("tpu_experiments/samples/wiki*") == ["wiki_a.jsonl"]


def test_urls(memory):
    assert names(f"{memory}/a.jsonl") == ["a.jsonl"]
    assert names(memory) == ["a.jsonl", "sub/b.jsonl"]
    assert names(f"{memory}/**/*.jsonl") == ["a.jsonl", "sub/b.jsonl"]
    assert names(f"{memory}/sub/*.jsonl") == ["b.jsonl"]
    assert texts_of(memory) == ["a.jsonl", "sub/b.jsonl"]
    sentence = complaint(f"{memory}/a.json")
    assert sentence.endswith(f"there is nothing there. Did you mean a.jsonl in {memory}? {ASK}")
    assert "no .jsonl" in complaint(f"{memory}/sub/*.md")


def test_fingerprint_of_a_url_without_marks_is_of_its_bytes(memory):
    first, second = (SourceFile("a", f"{memory}/{name}") for name in ("a.jsonl", "sub/b.jsonl"))
    assert fingerprint(first).startswith("sha256=")
    assert fingerprint(first) != fingerprint(second)


@pytest.mark.parametrize("path", ["nosuchscheme://a/b.jsonl", "s4://bucket/a"])
def test_url_out_of_reach(path):
    assert f"{path.partition('/')[0]}// is not opened; give a local path, or a URL of" in complaint(path)


@pytest.mark.parametrize("path", ["org/set", "imdb", "org/set.v2"])
def test_hub_ids(path):
    assert names(path) == []


def test_missing_file_names_what_is_near(tmp_path):
    written(tmp_path, "wiki_ro.jsonl", jsonl(TEXTS))
    sentence = complaint(tmp_path / "wiki_or.jsonl")
    assert f"there is no such file or folder. Did you mean wiki_ro.jsonl in {tmp_path}? {ASK}" in sentence


@pytest.mark.parametrize("path", ["./nowhere", "~/nowhere/at/all", "nowhere.parquet", "a/b.jsonl.gz", "a/b.zip"])
def test_missing_path_is_not_taken_for_a_hub_id(path):
    assert "there is no such file or folder" in complaint(path)


def test_missing_folder_is_said(tmp_path):
    sentence = complaint(tmp_path / "gone" / "a.jsonl")
    assert f"The folder {tmp_path / 'gone'} does not exist either." in sentence


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("a.zip", "archives (.zip) are not read; unpack it and point data.x.path= at the folder."),
        ("a.tar.gz", "archives (.tar.gz) are not read"),
        ("a.TGZ", "archives (.tgz) are not read"),
        ("a.parquet.gz", "parquet is compressed inside; unpack the .gz around it"),
        ("a.arrow", "the suffix '.arrow' is not supported; convert the file to .jsonl, .ndjson, .json, .parquet,"),
        ("a.md.zst", "the suffix '.md' is not supported"),
    ],
)
def test_files_that_are_not_read(tmp_path, name, sentence):
    assert sentence in complaint(written(tmp_path, name, b"PK"))


def test_folder_without_data(tmp_path):
    assert "among the 0 files there (nothing)" in complaint(tmp_path)
    written(tmp_path, "data.arrow", "")
    assert f"no {SUPPORTED} file is among the 1 files there (data.arrow)" in complaint(tmp_path)


def test_data_that_a_folder_holds_and_is_not_read_is_named(folder, caplog):
    written(folder, "more.zip", b"PK")
    assert "more.zip" not in names(folder)
    assert f"data.x.path={folder}: files of unsupported types are skipped: more.zip" in caplog.messages
