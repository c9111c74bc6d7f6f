"""Sources in a bucket, against an emulator of Cloud Storage."""

import bz2
import gzip
import json
import lzma

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from tests.data.readers import TEXTS, jsonl, read, rows_of, spec_for, split_rows, texts_of
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.reading.files import fingerprint
from tpu_experiments.data.reading.locations import list_files
from tpu_experiments.storage import streams

pytest_plugins = ("tests.gcs",)


def put(url: str, content: bytes) -> str:
    filesystem, key = fsspec.url_to_fs(url)
    filesystem.pipe_file(key, content)
    return url


def rows(texts):
    return [{"text": text} for text in texts]


def test_file_folder_and_pattern(gcs_bucket):
    one = put(f"{gcs_bucket}/set/a.jsonl", jsonl(["1"]).encode())
    put(f"{gcs_bucket}/set/deep/b.json", json.dumps(rows(["2", "3"])).encode())
    put(f"{gcs_bucket}/set/.hidden/c.jsonl", jsonl(["4"]).encode())
    put(f"{gcs_bucket}/settled.jsonl", jsonl(["5"]).encode())
    assert texts_of(one) == ["1"]
    for folder in (f"{gcs_bucket}/set", f"{gcs_bucket}/set/"):
        assert texts_of(folder) == ["1", "2", "3"], "and nothing of settled.jsonl, whose key begins alike"
    assert [row.id for row in read(f"{gcs_bucket}/set")] == ["a.jsonl:1", "deep/b.json:1", "deep/b.json:2"]
    assert texts_of(f"{gcs_bucket}/set/**/*.json*") == ["1", "2", "3"]
    assert texts_of(f"{gcs_bucket}/*.jsonl") == ["5"]
    assert texts_of(gcs_bucket) == ["1", "2", "3", "5"]


def test_what_is_not_there(gcs_bucket):
    put(f"{gcs_bucket}/set/wiki_ro.jsonl", b"")
    for path, sentence in {
        f"{gcs_bucket}/set/wiki_or.jsonl": f"there is nothing there. Did you mean wiki_ro.jsonl in {gcs_bucket}/set?",
        f"{gcs_bucket}/nowhere/": "there is nothing there. ",
        f"{gcs_bucket}/set/*.txt": "there is nothing there. ",
    }.items():
        with pytest.raises(ConfigError) as caught:
            list_files(spec_for(path))
        assert str(caught.value).startswith(f"data.x.path={path}; {sentence}")


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress), (".zst", zstandard.compress)],
)
def test_compressed_and_in_pieces(gcs_bucket, monkeypatch, suffix, pack):
    monkeypatch.setattr(streams, "REMOTE_BLOCK_BYTES", 1 << 16)
    texts = [f"rândul {number} {number * 7919**3 % 10**12}" for number in range(10_000)]
    packed = pack(jsonl(texts).encode())
    assert texts_of(put(f"{gcs_bucket}/a.jsonl{suffix}", packed)) == texts
    documents, refused = split_rows(put(f"{gcs_bucket}/cut.jsonl{suffix}", packed[:-10]))
    assert [document.text for document in documents] == texts[: len(documents)]
    assert [row.reason for row in refused] == (["truncated"] if suffix else ["not_json"])


def test_parquet_and_csv(gcs_bucket, tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(TEXTS)), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    assert texts_of(put(f"{gcs_bucket}/a.parquet", content)) == TEXTS
    _, refused = split_rows(put(f"{gcs_bucket}/cut.parquet", content[:-10]))
    assert [row.reason for row in refused] == ["not_parquet"]
    assert texts_of(put(f"{gcs_bucket}/a.csv", b'text\n"a\nb"\nc\n')) == ["a\nb", "c"]


def test_fingerprint_follows_the_content_and_reads_none_of_it(gcs_bucket, monkeypatch):
    url = put(f"{gcs_bucket}/a.jsonl", jsonl(["a"]).encode())
    monkeypatch.setattr("tpu_experiments.data.reading.files._sha256", None)
    first = fingerprint(list_files(spec_for(url))[0])
    assert first.startswith(f"size={len(jsonl(['a']))} md5Hash=")
    put(url, jsonl(["b"]).encode())
    assert fingerprint(list_files(spec_for(url))[0]) != first
    put(url, jsonl(["a"]).encode())
    assert fingerprint(list_files(spec_for(url))[0]) == first


def test_a_network_that_fails_is_no_bad_row(gcs_bucket, gcs_server, monkeypatch):
    monkeypatch.setattr(streams, "REMOTE_BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(streams, "CHUNK_BYTES", 1 << 14)
    rows_read = rows_of(spec_for(put(f"{gcs_bucket}/a.jsonl", jsonl(["a" * 1000] * 300).encode())))
    next(rows_read)
    gcs_server.wipe(keep_buckets=True)
    with pytest.raises(
        ConfigError, match=r"reading gs://bkt/a\.jsonl failed after [1-9][0-9]* rows \(FileNotFoundError"
    ):
        list(rows_read)
