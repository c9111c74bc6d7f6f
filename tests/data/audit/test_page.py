import re
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.data.manifest_samples import manifest
from tpu_experiments.data.audit.page import audit_page
from tpu_experiments.data.audit.summary import audit_hash, audit_json
from tpu_experiments.data.rows import padding

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Tags that must be closed are closed in order; counts what there is."""

    def __init__(self, html):
        super().__init__()
        self.stack, self.tags, self.text, self.classes = [], [], "", []
        self.feed(html)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.classes.append((dict(attrs).get("class") or "").split())
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text += data


def rows_of(tokenizer, text, *, num_rows=6, seq_len=64):
    """Rows of two segments of `text` each, the second one learnt but for its first token."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    rows = padding(num_rows, seq_len=seq_len)
    for number in range(2):
        part = slice(number * len(ids), (number + 1) * len(ids))
        rows.ids_NT[:, part] = ids
        rows.segments_NT[:, part] = number + 1
        rows.positions_NT[:, part] = np.arange(len(ids))
        rows.learn_NT[:, part] = number == 1
    rows.learn_NT[rows.positions_NT == 0] = False
    return rows


@pytest.fixture(scope="module")
def rows(tokenizer):
    return rows_of(tokenizer, "Bună ziua <i>😀</i>")


@pytest.fixture(scope="module")
def html(tokenizer, rows):
    made = manifest(seq_len=64)
    return audit_page(
        [made, manifest(source="wiki_ro", kind="text")], stores={("ultrachat_ro", 64): rows}, tokenizer=tokenizer
    )


def test_the_page_is_well_formed_and_needs_nothing_from_outside(html):
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object", "base"} & {tag for tag, _ in page.tags}
    assert not [attrs for _, attrs in page.tags if {"src", "href", "srcset", "action", "style"} & set(attrs)]
    assert not re.findall(r"https?://|//\w+\.\w+|@import|url\(", html)
    assert "$" not in html


def test_the_page_shows_the_numbers(html):
    text = Page(html).text
    # Two sources with the same numbers: 2 * 240 read, 2 * 229 kept.
    assert "of 480 read; 22 left out and reported" in text
    for shown in ("458", "212,000", "22.5 %", "wiki_ro", "not json", "line 17 of a.jsonl", "romanian letters 1,200"):
        assert shown in text
    assert audit_hash(manifest(seq_len=64)) in text
    assert audit_json([manifest(seq_len=64), manifest(source="wiki_ro", kind="text")])["audit_hash"] in text


def test_exactly_the_learnt_tokens_of_the_shown_rows_are_marked(html, rows):
    tokens = [classes for classes in Page(html).classes if "t" in classes]
    assert len(tokens) == 4 * int(np.count_nonzero(rows.segments_NT[0]))
    assert sum("learnt" in classes for classes in tokens) == 4 * int(rows.learn_NT[0].sum()) > 0
    assert html.count('<div class="segment">') == 8
    assert html.count("segment 2 · from position 0") == 4
    assert html.count("tokens of padding") == 4


def test_light_and_dark_and_learnt_not_by_colour_alone(html):
    assert "prefers-color-scheme: dark" in html
    assert re.search(r"\.learnt\.t[^}]*border-bottom", html)
    labelled = [attrs for tag, attrs in Page(html).tags if tag == "svg"]
    assert labelled
    assert all(attrs["aria-label"] and attrs["role"] == "img" for attrs in labelled)


def test_everything_from_data_is_escaped(tokenizer):
    hostile = manifest(
        source=HOSTILE,
        kind=HOSTILE,
        tokenizer=HOSTILE,
        tokenizer_hash=HOSTILE,
        template_hash=HOSTILE,
        packing=HOSTILE,
        documents_reported={HOSTILE: 11},
        changes={HOSTILE: 1},
        examples={HOSTILE: [{"place": HOSTILE, "message": HOSTILE}]},
        overlaps={"test_content_in_train": 1},
        config={"duplicates": {"near": HOSTILE}},
        seq_len=256,
    )
    hostile["splits"] = {HOSTILE: hostile["splits"].pop("train"), **hostile["splits"]}
    stores = {(HOSTILE, 256): rows_of(tokenizer, HOSTILE, seq_len=256)}
    page = Page(audit_page([hostile], stores=stores, tokenizer=tokenizer))
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert page.text.count("<script>alert(1)</script>") >= 10


def test_rows_of_another_length_and_empty_stores_are_not_shown(tokenizer, rows):
    other = audit_page([manifest(seq_len=128)], stores={("ultrachat_ro", 64): rows}, tokenizer=tokenizer)
    empty = {("ultrachat_ro", 64): rows.take(slice(0, 0))}
    none = audit_page([manifest(seq_len=64)], stores=empty, tokenizer=tokenizer)
    for page in (other, none):
        assert 'class="segment"' not in page
        Page(page)


def test_the_page_is_the_same_every_time(html, tokenizer, rows):
    made = [manifest(seq_len=64), manifest(source="wiki_ro", kind="text")]
    assert audit_page(made, stores={("ultrachat_ro", 64): rows}, tokenizer=tokenizer) == html
