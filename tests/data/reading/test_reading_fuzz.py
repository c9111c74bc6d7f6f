"""Damaged, odd and huge input: every row gives a document or a Refused, and nothing but a ConfigError is ever raised.

Rows are countable in .jsonl (lines that are not blank) and .csv (records): there, documents + refused = rows.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.data.readers import read, recognised, spec_for, split_rows
from tpu_experiments.config.data_schema import FORMATS_OF_KIND
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.documents import Document, Refused
from tpu_experiments.data.reading.formats import document_of
from tpu_experiments.data.reading.raw_rows import RawRow
from tpu_experiments.storage import streams

PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}
FUZZ = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
# Without lone surrogates, which no file can hold but as an escape; those are in `escaped`.
written_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
any_text = st.text(st.characters(), max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=8,
)
escaped = st.fixed_dictionaries({"text": any_text}).map(lambda row: json.dumps(row).encode())
plain = st.fixed_dictionaries({"text": written_text}).map(lambda row: json.dumps(row, ensure_ascii=False).encode())
latin = st.binary(min_size=1, max_size=30).map(lambda data: b'{"text": "' + data + b'"}')
junk = st.binary(max_size=40) | json_values.map(lambda value: json.dumps(value).encode())
lines = st.lists(st.one_of(escaped, plain, latin, junk), max_size=8)
line_ends = st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\n \t\n"])


def outcome(path: Path, **values: object) -> tuple[list[Document], list[Refused]]:
    """Documents and refused rows; a source without a row has neither."""
    try:
        return split_rows(path, **values)
    except ConfigError as error:
        if "it is empty: 0 documents were read" not in str(error):
            raise
        return [], []


def damaged(content: bytes, data: st.DataObject) -> bytes:
    """The content cut off, or with some of its bytes replaced."""
    if not content or data.draw(st.booleans(), label="cut"):
        return content[: data.draw(st.integers(0, len(content)), label="length")]
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3), label="number of bytes")):
        changed[data.draw(st.integers(0, len(content) - 1), label="where")] = data.draw(
            st.integers(0, 255), label="byte"
        )
    return bytes(changed)


def num_lines(content: bytes) -> int:
    """Lines that are not blank, counted in another way than the reader does."""
    rows = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return sum(1 for row in rows if row.translate(None, b" \t\n\r\x0b\x0c"))


@FUZZ
@given(lines=lines, end=line_ends, data=st.data(), chunk_bytes=st.sampled_from([3, 1 << 20]))
def test_lines_of_anything(tmp_path, lines, end, data, chunk_bytes):
    content = damaged(end.join(lines), data)
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "CHUNK_BYTES", chunk_bytes)
        documents, refused = outcome(tmp_path / "a.jsonl")
    assert len(documents) + len(refused) == num_lines(content)


@FUZZ
@given(
    rows=st.lists(st.tuples(written_text, written_text), min_size=1, max_size=8),
    columns=st.lists(st.integers(0, 20), max_size=2),
    style=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_tables_with_line_ends_and_quotes_in_their_fields(tmp_path, rows, columns, style, end):
    file = io.StringIO(newline="")
    writer = csv.writer(file, quoting=style, lineterminator=end)
    writer.writerow(["text", "id"])
    if (style, end) == (csv.QUOTE_MINIMAL, "\n"):  # Python's writer then leaves \r without quotes, which ends a record
        rows = [[field.replace("\r", "") for field in row] for row in rows]
    records = [list(row) for row in rows]
    for number in columns:  # one field too many in some records
        records[number % len(records)].append("extra")
    writer.writerows(records)
    (tmp_path / "a.csv").write_bytes(file.getvalue().encode())
    documents, refused = outcome(tmp_path / "a.csv")
    # Each line of a record over several lines that cannot be read has a report.
    assert len(documents) + sum("is inside the record" not in row.message for row in refused) == len(records)
    whole = [record[0] for record in records if len(record) == 2 and record[0].strip()]
    assert [document.text for document in documents] == whole


@FUZZ
@given(content=st.binary(max_size=200) | lines.map(b",".join), data=st.data())
@example(content=b'text\n"', data=None)
@example(content=b"text\r", data=None)
def test_tables_of_anything(tmp_path, content, data):
    content = b"text\n" + content if data is None else damaged(b"text\tid\n" + content, data)
    (tmp_path / "a.tsv").write_bytes(content)
    documents, refused = outcome(tmp_path / "a.tsv")
    text = io.StringIO(content.decode("utf-8-sig", "surrogateescape"), newline="")
    header, *records = [record for record in csv.reader(text, delimiter="\t") if record] or [[]]
    if any("the file is not read" in row.message for row in refused):
        assert (len(documents), len(refused)) == (0, 1)
        assert len(set(header)) < len(header) or "\udc80" <= max("".join(header)) <= "\udcff" or not records
    else:
        assert len(documents) + len(refused) == len(records)


@FUZZ
@given(
    values=st.lists(st.fixed_dictionaries({"text": any_text}) | json_values, max_size=6),
    indent=st.sampled_from([None, 2]),
    chunk_bytes=st.sampled_from([1, 5, 1 << 20]),
    data=st.data(),
)
def test_arrays(tmp_path, values, indent, chunk_bytes, data):
    content = json.dumps(values, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "CHUNK_BYTES", chunk_bytes)
        (tmp_path / "a.json").write_bytes(content)
        documents, refused = outcome(tmp_path / "a.json")
        assert len(documents) + len(refused) == len(values)
        texts = [document.text for document in documents]
        (tmp_path / "a.json").write_bytes(content[: data.draw(st.integers(1, len(content) - 1), label="length")])
        documents, refused = outcome(tmp_path / "a.json")
    assert [document.text for document in documents] == texts[: len(documents)]
    assert [row.reason for row in refused][-1:] in (["truncated"], ["not_json"]), "a cut is always reported"
    assert [row.reason for row in refused].count("truncated") <= 1


@FUZZ
@given(values=st.lists(json_values, max_size=5), ensure_ascii=st.booleans(), data=st.data())
def test_damaged_arrays(tmp_path, values, ensure_ascii, data):
    content = json.dumps(values, ensure_ascii=ensure_ascii).encode(errors="surrogatepass")
    (tmp_path / "a.json").write_bytes(damaged(content, data))
    outcome(tmp_path / "a.json")


@FUZZ
@given(lines=st.lists(plain, min_size=1, max_size=30), suffix=st.sampled_from([*PACK]), data=st.data())
def test_damaged_compression(tmp_path, lines, suffix, data):
    packed = PACK[suffix](b"\n".join(lines))
    changed = damaged(packed, data)
    (tmp_path / f"a.jsonl{suffix}").write_bytes(changed)
    documents, refused = outcome(tmp_path / f"a.jsonl{suffix}")
    if suffix and packed.startswith(changed) and changed != packed:
        assert [row.reason for row in refused if row.is_bad_row] == ["truncated"]
        assert len(documents) + len(refused) <= len(lines) + 1


@pytest.fixture(scope="module")
def parquet() -> bytes:
    file = io.BytesIO()
    rows = [{"text": f"rândul {number}", "turns": [{"a": number}], "id": number} for number in range(200)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=50)
    return file.getvalue()


@settings(FUZZ, max_examples=300)
@given(data=st.data())
def test_damaged_parquet(tmp_path, parquet, data):
    changed = damaged(parquet, data)
    (tmp_path / "a.parquet").write_bytes(changed)
    documents, refused = outcome(tmp_path / "a.parquet")
    if len(changed) < len(parquet):
        assert ([row.reason for row in refused], documents) == (["not_parquet"], [])
    assert len(documents) + len(refused) >= 200 or refused, "no row is lost in silence"


@FUZZ
@given(
    row=st.dictionaries(
        st.sampled_from(
            ["text", "id", "messages", "conversations", "data", "question", "answer", "instruction", "input", "output"]
        ),
        json_values | st.lists(st.dictionaries(st.sampled_from(["role", "content", "from", "value"]), any_text)),
        max_size=4,
    ),
    fields=st.sampled_from([{}, {"text": "id"}, {"messages": "data"}]),
)
def test_rows_of_any_shape(row, fields):
    for kind, formats in FORMATS_OF_KIND.items():
        for layout in formats[1:]:
            spec = spec_for("a.jsonl", kind=kind, format=layout, fields=fields)
            found = document_of(RawRow(row, "a.jsonl", "line", 1), spec=spec)
            again = document_of(RawRow(json.dumps(row).encode(), "a.jsonl", "line", 1), spec=spec)
            assert type(again) is type(found)
            assert (found.message if isinstance(found, Refused) else found.content + found.id).encode()


ROW_FIELDS = ["messages", "prompt", "completion", "question", "answer", "instruction", "output", "input", "system"]
ROW_FIELDS += ["history", "tools", "functions", "reasoning", "images", "choices", "label", "mask", "A", "B", "id"]
TURN_FIELDS = [
    "role",
    "from",
    "content",
    "value",
    "reasoning",
    "thinking",
    "tool_calls",
    "function_call",
    "name",
    "loss",
]
TURN_FIELDS += ["weight", "masked", "images", "refusal", "channel", "tools", "type", "text", "arguments", "function"]
roles = st.sampled_from(
    ["system", "user", "assistant", "tool", "function_call", "gpt", "thinking", "text", "tool_call"]
)
turns_of_anything = st.recursive(
    json_values | roles | st.sampled_from(["[]", '[{"role": "user"}]', '{"name": "a"}', 0, 1, 0.5]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TURN_FIELDS), inner, max_size=4),
    max_leaves=12,
)


@FUZZ
@given(
    row=st.dictionaries(st.sampled_from(ROW_FIELDS), turns_of_anything, max_size=5),
    turns=st.lists(st.dictionaries(st.sampled_from(TURN_FIELDS), turns_of_anything, max_size=4), max_size=3),
    role=roles,
)
def test_turns_of_any_shape(row, turns, role):
    row = row | {"messages": [turn | {"role": role} for turn in turns]} if turns else row
    for kind, formats in FORMATS_OF_KIND.items():
        for layout in formats[1:]:
            spec = spec_for("a.jsonl", kind=kind, format=layout)
            found = document_of(RawRow(row, "a.jsonl", "line", 1), spec=spec)
            assert type(document_of(RawRow(json.dumps(row).encode(), "a.jsonl", "line", 1), spec=spec)) is type(found)
            assert (found.message if isinstance(found, Refused) else found.content + "".join(found.unread)).encode()


MARKS = st.sampled_from(
    ["<s>", "</s>", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>", "### Human:", "### Assistant:", "###"]
)


@FUZZ
@given(parts=st.lists(MARKS | written_text, max_size=10), layout=st.sampled_from(["llama2", "human_assistant"]))
def test_marks_in_any_order(parts, layout):
    spec = spec_for("a.jsonl", kind="chat", format=layout)
    found = document_of(RawRow({"text": "".join(parts)}, "a.jsonl", "line", 1), spec=spec)
    if isinstance(found, Document):
        assert found.messages
        assert found.messages[-1][0] == "assistant"
        assert found.messages[-1][1].strip()


@FUZZ
@given(lines=lines, kind=st.sampled_from(["text", "chat"]))
def test_recognising_anything(tmp_path, lines, kind):
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    spec = spec_for(tmp_path / "a.jsonl", kind=kind, format="auto")
    try:
        assert recognised(spec).format != "auto"
    except ConfigError:  # several formats, or none
        return
    assert len(read(tmp_path / "a.jsonl", kind=kind, format="auto")) == num_lines(b"\n".join(lines))
