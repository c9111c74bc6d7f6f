"""Quotation marks in .csv and .tsv: around fields, or plain characters."""

import csv
import io
import random

import pytest

from tests.data import readers
from tests.data.preparing import prepared, text_source
from tests.data.readers import spec_for, split_rows, texts_of, written
from tpu_experiments.data.reading import tables

ROWS = 400


def pairs(delimiter, *, seed=0):
    """Lines of three columns with bare quotation marks, many at the start of a field, few of them in pairs."""
    draw = random.Random(seed)
    lines = [delimiter.join(("score", "text", "other"))]
    for i in range(ROWS):
        text, other = f"Propoziția {i} despre ceva", f"Fraza {i} despre altceva"
        kind = draw.randrange(12)
        text = {0: f'"{text}', 1: f'"{text}" a spus el', 2: f'El a spus "{text}"', 3: f'{text}"'}.get(kind, text)
        other = {4: f'"{other}', 5: f'"Da", {other}'.replace(",", ""), 0: f'{other}"'}.get(kind, other)
        lines.append(delimiter.join((f"{draw.random():.2f}", text, other)))
    return "\n".join(lines) + "\n"


def rows_of(path, **values):
    return [row.data for row in readers.rows_of(spec_for(path, **values))]


@pytest.mark.parametrize(("name", "delimiter"), [("a.tsv", "\t"), ("a.csv", ","), ("a.csv", ";")])
@pytest.mark.parametrize("seed", range(3))
def test_plain_quotation_marks_lose_no_row(tmp_path, name, delimiter, seed, caplog):
    tables._log_once.cache_clear()
    content = pairs(delimiter, seed=seed)
    path = written(tmp_path, name, content)
    expected = list(csv.DictReader(io.StringIO(content), delimiter=delimiter, quoting=csv.QUOTE_NONE))
    with caplog.at_level("INFO"):
        assert rows_of(path) == expected
    assert len(expected) == ROWS
    assert "quotation marks are read as plain characters (data.x.quoting=auto)" in caplog.text
    assert rows_of(path, quoting="none") == expected


def test_a_prepared_tsv_accounts_for_every_line(tmp_path, tokenizer):
    path = written(tmp_path, "a.tsv", pairs("\t"))
    folders = set()
    for quoting, is_all in (("auto", True), ("none", True), ("minimal", False)):
        source = text_source(path, format="text", on_bad_row="skip", quoting=quoting)
        made = prepared({"a": source}, folder=tmp_path / "p", tokenizer=tokenizer)["a"]
        manifest = made.manifests[64]
        reported = sum(manifest["documents_reported"].values())
        assert manifest["documents_in"] == manifest["documents_out"] + reported
        assert (manifest["documents_out"] == ROWS) == is_all
        folders.add(made.folders[64])
    assert len(folders) == 3


def quoted(rows, delimiter=",", **values):
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter, **values).writerows(rows)
    return file.getvalue()


PROSE = [
    ("id", "text"),
    ("1", "Două\nrânduri, o virgulă"),
    ("2", 'El a spus "da", apoi\na plecat'),
    ("3", "nimic"),
    ("4", 'tot "între ghilimele"'),
]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("values", [{}, {"quoting": csv.QUOTE_ALL}, {"lineterminator": "\n"}])
@pytest.mark.parametrize("copies", [1, 30])
def test_fields_in_quotation_marks_stay_one(tmp_path, delimiter, values, copies):
    path = written(
        tmp_path, "a.tsv" if delimiter == "\t" else "a.csv", quoted(PROSE + PROSE[1:] * copies, delimiter, **values)
    )
    assert texts_of(path) == [text for _, text in PROSE[1:]] * (copies + 1)


def test_texts_of_one_column_keep_their_lines(tmp_path):
    texts = ["Un paragraf.\n\nAlt paragraf.", 'Cu "ghilimele"\nși rânduri']
    path = written(tmp_path, "a.csv", quoted([("text",), *((text,) for text in texts * 20)]))
    assert texts_of(path) == texts * 20


def test_a_careless_mark_in_a_quoted_file_changes_nothing_else(tmp_path):
    content = quoted(PROSE * 1 + PROSE[1:] * 20) + '99,"a" b\n'
    assert texts_of(written(tmp_path, "a.csv", content))[:4] == [text for _, text in PROSE[1:]]


def test_names_in_quotation_marks_say_how_the_file_is_written(tmp_path):
    path = written(tmp_path, "a.tsv", '"id"\t"text"\n"1"\t"a"\n"2"\t"b"\n')
    assert texts_of(path) == ["a", "b"]


def test_what_comes_behind_the_head_is_reported_line_by_line(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "HEAD_CHARACTERS", 200)
    lines = [f'{i}\t"text {i}"' for i in range(30)]
    lines += ['30\t"deschis', "31\tx", '32\tînchis"', "33\tx", '34\t"deschis', "35", '36"\tx\ty', "37\tx"]
    path = written(tmp_path, "a.tsv", "\n".join(["id\ttext", *lines]) + "\n")
    documents, refused = split_rows(path)
    assert len(documents) + len(refused) == len(lines)
    assert [row.place for row in refused] == [f"line {n} of a.tsv" for n in (32, 33, 34, 36, 37, 38)]
    assert refused[0].reason == "quotation"
    assert "set data.x.quoting=none" in refused[0].message
    assert refused[3].reason == "wrong_columns"
    assert "read as one record up to line 38" in refused[3].message


def test_minimal_names_the_mark_and_the_key(tmp_path):
    path = written(tmp_path, "a.tsv", 'id\ttext\tother\n1\t"a\tb\n2\tc\td\n')
    documents, refused = split_rows(path, quoting="minimal")
    assert not documents
    assert [row.place for row in refused] == ["line 2 of a.tsv", "line 3 of a.tsv"]
    assert (
        "opens a quotation that is not closed by the end of the file, line 3; close it, or set data.x.quoting=none"
        in (refused[0].message)
    )
