"""Raw rows of single files: what is broken gives one Refused, what is cut gives all that came before."""

import bz2
import gzip
import json
import lzma
import pickle

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from tests.data.readers import TEXTS, file_at, jsonl, raw, spec_for, split_rows, texts_of, written
from tests.tiers import only
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.documents import Refused
from tpu_experiments.data.reading.files import fingerprint, read_raw
from tpu_experiments.data.reading.raw_rows import RawRow
from tpu_experiments.storage import streams

PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}

BROKEN = [
    (
        "a.jsonl",
        jsonl(["a"]) + '{"text": "b"\n' + jsonl(["c"]),
        2,
        "not_json",
        "line 2 of a.jsonl is not JSON: Expecting",
    ),
    ("a.jsonl", jsonl(["a"]) + "[1]\n", 1, "wrong_type", "line 2 of a.jsonl is a JSON list, not an object"),
    ("a.jsonl", jsonl(["a"]) + "[" * 9999 + "\n", 1, "not_json", "line 2 of a.jsonl is not JSON: maximum recursion"),
    ("a.jsonl", jsonl(["a"]) + '{"text": ' + "9" * 5000 + "}\n", 1, "not_json", "Exceeds the limit"),
    ("a.jsonl", b"\xff\xfe" + jsonl(["a"]).strip().encode("utf-16-le"), 0, "not_utf8", "it begins as UTF-16 does"),
    ("a.jsonl", jsonl(["a"]) + "\0\n", 1, "not_json", "line 2 of a.jsonl is not JSON"),
    (
        "a.jsonl",
        jsonl(["a"]) + '{"text": "b\\ud800"}\n',
        1,
        "surrogate",
        r"half of a UTF-16 pair (\ud800) at character 1",
    ),
    (
        "a.jsonl",
        jsonl(["a"]).encode() + b'{"text": "\xe9t\xe9"}\n' + jsonl(["c"]).encode(),
        2,
        "not_utf8",
        "line 2 of a.jsonl is not UTF-8: byte 0xe9 at byte 11 of the line (invalid continuation byte)",
    ),
    ("a.txt", b"unu\n\xe9\ndoi\r\n", 2, "not_utf8", "line 2 of a.txt is not UTF-8: byte 0xe9 at byte 1"),
    (
        "a.json",
        '"text"',
        0,
        "not_json",
        "a.json is neither a JSON array of objects, nor an object with such an array as `data`, nor one object a line",
    ),
    ("a.json", b"\xbb[]", 0, "not_json", "a.json is neither a JSON array of objects, nor an object with"),
    ("a.json", '{\n "text": "a"\n}\n', 0, "not_json", "a.json is neither a JSON array of objects, nor an object with"),
    ("a.json", jsonl(["a"]) + "{\n", 1, "not_json", "line 2 of a.json is not JSON: Expecting property name"),
    ("a.json", '[{"text": "a"}, 3, {"text": "b"}]', 2, "wrong_type", "row 2 of a.json is a JSON int, not an object"),
    (
        "a.json",
        '[{"text": "a"}, {"text" 3}, {"a": "long enough"}]',
        1,
        "not_json",
        "row 2 of a.json is not JSON: Expecting ':'",
    ),
    ("a.json", '[{"text": "a"} {"text": "b"}]', 1, "not_json", "expected , or ] after it but found '{'"),
    ("a.json", '[{"text": "a"}', 1, "truncated", "row 2 of a.json could not be read, nor could anything after it"),
    ("a.json", '[{"text": "a"}, {"text": "b', 1, "truncated", "row 2 of a.json could not be read"),
    ("a.json", '[{"text": "a"}, {"text": "b"', 1, "truncated", "the file ends inside it"),
    ("a.json", '[{"text": "a"},', 1, "truncated", "row 2 of a.json could not be read"),
    ("a.json", '[{"text": "a"}, ' + "[" * 9999, 1, "not_json", "maximum recursion depth"),
    ("a.json", '[{"text": "a"}][{"text": "b"}]', 1, "not_json", "row 1 of a.json is not JSON: more follows"),
    (
        "a.json",
        b'[{"text": "a"}, {"text": "\xe9t"}, {"text": "c"}]',
        2,
        "not_utf8",
        "row 2 of a.json is not UTF-8: byte 0xe9",
    ),
    ("a.json", b'[{"text": "a"}, {"t\xe9', 1, "truncated", "row 2 of a.json could not be read"),
    ("a.parquet", "PAR1", 0, "not_parquet", "a.parquet is not a readable parquet file after 0 rows:"),
    (
        "a.csv",
        'text,b\na,1\nb\n"c\nd",2\n',
        2,
        "wrong_columns",
        "line 3 of a.csv has 1 fields where the file has 2 columns",
    ),
    ("a.csv", b"text,b\na,\xe9\nc,d\n", 1, "not_utf8", "line 2 of a.csv is not UTF-8: it holds the byte 0xe9"),
    (
        "a.csv",
        'text\na\n"b\nc\nd\n',
        1,
        "not_csv",
        "line 3 of a.csv opens a quotation that is not closed by the end of the file, line 5",
    ),
    ("a.csv", "text,text\na,b\n", 0, "not_csv", "line 1 of a.csv names the column 'text' twice"),
    (
        "a.csv",
        '"text\na\nb\n',
        0,
        "not_csv",
        "line 1 of a.csv opens a quotation that is not closed; the file is not read",
    ),
    ("a.csv", b"t\xe9xt\na\n", 0, "not_csv", "line 1 of a.csv is not UTF-8"),
]


@pytest.mark.parametrize(("name", "content", "num_documents", "reason", "sentence"), BROKEN)
@pytest.mark.parametrize("chunk_bytes", [7, 1 << 20])
def test_broken_file(tmp_path, monkeypatch, name, content, num_documents, reason, sentence, chunk_bytes):
    monkeypatch.setattr(streams, "CHUNK_BYTES", chunk_bytes)
    documents, refused = split_rows(written(tmp_path, name, content))
    assert len(documents) == num_documents
    # Every line of an unclosed quotation is reported, since it may have been a row.
    lines = 3 if "by the end of the file" in sentence and name == "a.csv" else 1
    assert [row.reason for row in refused] == [reason] * lines
    assert sentence in f"{refused[0].place} {refused[0].message}"
    assert refused[0].is_bad_row


def test_array_longer_than_a_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "CHUNK_BYTES", 7)
    texts = ["ș" * length for length in (1, 2, 3, 50, 1000)]
    rows = [{"text": text, "list": [1, {"a": "]},"}, -1.5e-7, True]} for text in texts]
    assert texts_of(written(tmp_path, "a.json", json.dumps(rows, ensure_ascii=False))) == texts


@pytest.mark.parametrize("chunk_bytes", range(1, 9))
def test_array_of_values_cut_anywhere(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(streams, "CHUNK_BYTES", chunk_bytes)
    values = [123456789012, {"text": "a"}, "]" * 20, -1.25, 0.0, 1.5e300, [{}], None]
    rows = raw(written(tmp_path, "a.json", b"\xef\xbb\xbf" + json.dumps(values).encode()))
    types = ["int", "str", "float", "float", "float", "list", "NoneType"]
    refused = [row for row in rows if isinstance(row, Refused)]
    assert [row.message.split(",")[0] for row in refused] == [f"is a JSON {name}" for name in types]
    assert [row.data for row in rows if isinstance(row, RawRow)] == [{"text": "a"}]


def test_a_mistake_early_in_an_array_does_not_read_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "CHUNK_BYTES", 64)
    monkeypatch.setattr("tpu_experiments.storage.streams._chunks", counted := CountedChunks(streams._chunks))
    path = written(tmp_path, "a.json", '[{"text" 1}' + ', {"text": "a"}' * 10_000 + "]")
    assert [row.reason for row in raw(path)] == ["not_json"]
    assert counted.number < 5


class CountedChunks:
    def __init__(self, chunks):
        self.chunks, self.number = chunks, 0

    def __call__(self, file, size):
        for chunk in self.chunks(file, size):
            self.number += 1
            yield chunk


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt"])
def test_compressed(tmp_path, name, suffix):
    texts = ["unu", "doi"]
    content = {
        ".jsonl": jsonl(texts),
        ".json": json.dumps([{"text": text} for text in texts]),
        ".txt": "\n".join(texts),
    }.get(name[1:], "text\n" + "\n".join(texts))
    assert texts_of(written(tmp_path, name + suffix.upper(), PACK[suffix](content.encode()))) == texts


@pytest.mark.parametrize("suffix", PACK)
def test_compressed_in_several_streams(tmp_path, suffix):
    """`cat a.gz b.gz`, pigz and pzstd write such files; fsspec's zstandard reader stops after the first."""
    parts = [PACK[suffix](jsonl([text]).encode()) for text in TEXTS]
    assert texts_of(written(tmp_path, f"a.jsonl{suffix}", b"".join(parts) + b"\0" * 8)) == TEXTS


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("name", only(["a.jsonl"], ["a.jsonl", "a.json", "a.csv"]))
def test_compressed_and_cut_off(tmp_path, name, suffix):
    """What was whole comes out, then one Refused; nothing is lost in silence."""
    texts = [f"rândul {number} {number * 7919**3 % 10**12}" for number in range(60_000)]
    body = {
        "a.jsonl": jsonl(texts),
        "a.json": json.dumps([{"text": t} for t in texts]),
        "a.csv": "text\n" + "\n".join(texts),
    }
    packed = PACK[suffix](body[name].encode())
    documents, refused = split_rows(written(tmp_path, name + suffix, packed[: len(packed) * 9 // 10]))
    assert [document.text for document in documents] == texts[: len(documents)]
    assert [row.reason for row in refused] == ["truncated"]
    assert "data ends early, after" in refused[0].message
    unit = "row" if name == "a.json" else "line"
    number = len(documents) + 1 + (name == "a.csv")
    assert refused[0].place == f"{unit} {number} of {name}{suffix}"
    assert len(documents) > 20_000  # bzip2's blocks of 900 kB come whole or not at all


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("content", [b"", b"not compressed at all"])
def test_not_compressed(tmp_path, suffix, content):
    documents, refused = split_rows(written(tmp_path, f"a.jsonl{suffix}", content))
    assert (documents, [row.reason for row in refused]) == ([], ["truncated"])
    assert refused[0].place == f"line 1 of a.jsonl{suffix}"


def test_csv_as_spreadsheets_write_it(tmp_path):
    csv = '\ufefftext,id\r\n"Două\r\nrânduri, ""citate""",a\r\n\r\ntrei,b\r\n' + "x" * 200_000 + ",c\r\n"
    documents, refused = split_rows(written(tmp_path, "a.csv", csv))
    assert [(row.id, row.text[:30]) for row in documents] == [
        ("a", 'Două\r\nrânduri, "citate"'),
        ("b", "trei"),
        ("c", "x" * 30),
    ]
    assert [row.place for row in documents] == ["line 2 of a.csv", "line 5 of a.csv", "line 6 of a.csv"]
    assert (len(documents[2].text), refused) == (200_000, [])
    assert texts_of(written(tmp_path, "b.csv", "id;text\n1;a, b\n")) == ["a, b"]
    assert texts_of(written(tmp_path, "b.tsv", "id\ttext\n1\ta, b\n")) == ["a, b"]
    assert texts_of(written(tmp_path, "mac.csv", "id,text\r1,a\r2,b")) == ["a", "b"]
    assert texts_of(written(tmp_path, "nul.csv", "id,text\n1,a\0b\n")) == ["a\0b"]


def test_text_is_a_document_a_line(tmp_path):
    path = written(tmp_path, "a.txt", "\ufeffunu\r\n\n  \n doi ")
    assert texts_of(path) == ["unu", " doi "]


def test_parquet_in_pieces(tmp_path):
    rows = [{"text": f"{number}", "id": number} for number in range(3000)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=700)
    assert texts_of(path) == [row["text"] for row in rows]
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 3 : len(damaged) // 3 + 40] = b"\xff" * 40
    documents, refused = split_rows(written(tmp_path, "b.parquet", bytes(damaged)))
    assert refused
    assert "b.parquet" in refused[-1].place
    assert [document.text for document in documents] == [row["text"] for row in rows[: len(documents)]]


def test_parquet_row_that_is_not_utf8(tmp_path):
    column = pyarrow.array([b"a", b"\xff", b"c"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    documents, refused = split_rows(tmp_path / "a.parquet")
    assert [document.text for document in documents] == ["a", "c"]
    assert [(row.reason, row.place) for row in refused] == [("unreadable", "row 2 of a.parquet")]


@pytest.mark.parametrize(
    ("name", "num_chars"),
    [("a.jsonl", 50_000_000), ("a.json", 5_000_000), ("a.csv", 5_000_000), ("a.txt", 5_000_000), ("a.jsonl.gz", 10**7)],
)
def test_enormous_document(tmp_path, name, num_chars):
    text = "ș" * num_chars  # two bytes each
    body = {".jsonl": jsonl([text, "b"]), ".json": json.dumps([{"text": text}, {"text": "b"}], ensure_ascii=False)}
    content = body.get(name.removesuffix(".gz")[1:], "text\n" * (name == "a.csv") + text + "\nb\n").encode()
    path = written(tmp_path, name, gzip.compress(content, 1) if name.endswith(".gz") else content)
    assert [len(text) for text in texts_of(path)] == [num_chars, 1]


def test_raw_rows_are_cheap_and_go_to_other_processes(tmp_path):
    rows = raw(written(tmp_path, "a.jsonl", jsonl(["a", "b"])))
    assert rows[1] == RawRow(b'{"text": "b"}', "a.jsonl", "line", 2), "a line is not parsed yet"
    assert pickle.loads(pickle.dumps(rows)) == rows
    assert rows[1].place == "line 2 of a.jsonl"


def test_a_failing_disk_is_no_bad_row(tmp_path, monkeypatch):
    """on_bad_row=skip must never skip what a second try would read."""
    path = written(tmp_path, "a.jsonl", jsonl(["a", "b"]))

    def chunks(file, size):
        yield jsonl(["a"]).encode()
        raise streams.UnreadableError("OSError: Input/output error")

    monkeypatch.setattr(streams, "_chunks", chunks)
    rows = read_raw(file_at(path), spec=spec_for(path, on_bad_row="skip"))
    next(rows)
    with pytest.raises(ConfigError, match=r"failed after 1 rows \(OSError: Input/output error\)") as caught:
        next(rows)
    assert str(caught.value).startswith("data.x.path=")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_file_that_is_gone(tmp_path, name):
    path = tmp_path / name
    with pytest.raises(ConfigError, match=r"failed after 0 rows \(FileNotFoundError"):
        next(read_raw(file_at(path), spec=spec_for(path)))
    with pytest.raises(ConfigError, match=r"it cannot be read \(UnreadableError: FileNotFoundError"):
        fingerprint(file_at(path))


def test_fingerprint_follows_the_bytes(tmp_path):
    first, same = written(tmp_path, "a.jsonl", jsonl(["a"])), written(tmp_path, "b.jsonl", jsonl(["a"]))
    assert fingerprint(file_at(first)) == fingerprint(file_at(same))
    assert fingerprint(file_at(first)).startswith("sha256=")
    assert fingerprint(file_at(written(tmp_path, "c.jsonl", jsonl(["b"])))) != fingerprint(file_at(first))


REPEATED = '{"text": "a", "text": "b"}'
NESTED = '{"text": "a", "meta": [{"x": 1, "y": {"z": 1, "z": 2}}]}'


@pytest.mark.parametrize("chunk_bytes", [5, 1 << 20])
@pytest.mark.parametrize(("row", "key"), [(REPEATED, "text"), (NESTED, "z")])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_key_that_comes_twice_spoils_its_row_alone(tmp_path, monkeypatch, name, row, key, chunk_bytes):
    monkeypatch.setattr(streams, "CHUNK_BYTES", chunk_bytes)
    rows = ['{"text": "unu"}', row, '{"text": "doi"}']
    content = "\n".join(rows) if name == "a.jsonl" else f"[{', '.join(rows)}]"
    documents, refused = split_rows(written(tmp_path, name, content))
    assert [document.text for document in documents] == ["unu", "doi"]
    [bad] = refused
    assert (bad.reason, bad.is_bad_row, bad.place.split()[1]) == ("not_json", True, "2")
    assert f"an object of it has the key {key!r} twice" in bad.message


def test_a_column_that_comes_twice_is_refused(tmp_path):
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    table = pyarrow.Table.from_arrays(columns, names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    documents, [refused] = split_rows(tmp_path / "a.parquet")
    assert not documents
    assert "names the column 'text' twice" in refused.message


WRAPPED = [
    ('{"version": "1.1", "data": [{"text": "unu"}, {"text": "doi"}]}', ["unu", "doi"]),
    ('{"data": [{"text": "unu"}], "count": {"rows": [1]}, "of": null}\n', ["unu"]),
    ('{\n  "meta": {"data": [1]},\n  "data": [\n    {"text": "unu"}\n  ]\n}', ["unu"]),
]


@pytest.mark.parametrize("chunk_bytes", [3, 1 << 20])
@pytest.mark.parametrize(("content", "texts"), WRAPPED)
def test_rows_that_an_object_holds(tmp_path, monkeypatch, content, texts, chunk_bytes):
    monkeypatch.setattr(streams, "CHUNK_BYTES", chunk_bytes)
    assert texts_of(written(tmp_path, "a.json", content)) == texts


@pytest.mark.parametrize(
    ("rest", "sentence"),
    [
        ("", "expected the } of its object but found 'the end'"),
        ("}}", "expected the } of its object but found '}'"),
        (', "data": []}', "has the key 'data' twice"),
        (', "a" 1}', "expected : after the key behind the rows"),
        (', "a": [1', "what follows the rows cannot be read"),
    ],
)
def test_what_follows_the_rows_of_an_object(tmp_path, rest, sentence):
    documents, [refused] = split_rows(written(tmp_path, "a.json", f'{{"data": [{{"text": "unu"}}]{rest}'))
    assert [document.text for document in documents] == ["unu"]
    assert sentence in refused.message


@pytest.mark.parametrize(
    ("row", "layout"),
    [({"data": ["a", "b"]}, "alternating"), ({"data": [{"role": "assistant", "content": "b"}]}, "messages")],
)
def test_a_row_with_its_turns_in_data_is_no_wrapper(tmp_path, row, layout):
    path = written(tmp_path, "a.json", json.dumps(row) + "\n" + json.dumps(row) + "\n")
    documents, refused = split_rows(path, kind="chat", format=layout)
    assert (len(documents), refused) == (2, [])


BARE = {
    "lines": jsonl(TEXTS).encode(),
    "array": json.dumps([{"text": text} for text in TEXTS]).encode(),
    "marked": b"\xef\xbb\xbf" + jsonl(TEXTS).encode(),
}


@pytest.mark.parametrize("content", BARE.values(), ids=BARE)
@pytest.mark.parametrize("pack", [None, *PACK])
def test_files_without_a_suffix_are_known_by_their_content(tmp_path, content, pack):
    packed = content if pack is None else PACK[pack](content)
    assert texts_of(written(tmp_path, "rows", packed)) == TEXTS
    assert texts_of(written(tmp_path / "folder", "part-00000", packed).parent) == TEXTS


def test_parquet_without_a_suffix(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "rows")
    assert texts_of(tmp_path / "rows") == TEXTS


def test_a_file_without_a_suffix_that_is_neither_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match="the file has no suffix, and its content is neither JSON nor parquet; rename"
    ):
        texts_of(written(tmp_path, "rows", "unu\n"))


def test_a_folders_other_files_without_a_suffix_are_named(tmp_path, caplog):
    written(tmp_path, "LICENSE", "MIT")
    assert texts_of(written(tmp_path, "rows.ndjson", jsonl(TEXTS)).parent) == TEXTS
    assert "types are skipped: LICENSE" in caplog.text
