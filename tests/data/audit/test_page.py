import re
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.data.manifest_samples import manifest
from tpu_experiments.data.audit.page import ON_ONE_PAGE, audit_pages
from tpu_experiments.data.audit.summary import audit_hash, audit_json
from tpu_experiments.data.rows import padding

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
VOID = {"meta", "br", "hr", "img", "link", "input"}


def audit_page(manifests, **values):
    """The one page of few sources."""
    (page,) = audit_pages(manifests, name="audit", **values).values()
    return page


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
    assert not [attrs for _, attrs in page.tags if {"src", "srcset", "action", "style"} & set(attrs)]
    links = [attrs["href"] for _, attrs in page.tags if "href" in attrs]
    anchors = {f"#{attrs['id']}" for _, attrs in page.tags if "id" in attrs}
    assert set(links) == anchors, "links lead to the sections of the page"
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


def many(count, **changes):
    return [manifest(source=f"source_{i:02d}", **changes) for i in range(count)]


def test_few_sources_share_a_page_that_begins_with_a_table_of_them(tokenizer, rows):
    pages = audit_pages(many(ON_ONE_PAGE), stores={}, tokenizer=tokenizer, name="few")
    assert list(pages) == ["few.html"]
    html = pages["few.html"]
    assert html.index("<h2>Sources</h2>") < html.index('<h2 id="source_00-1024">')
    assert "<h2>Sources</h2>" not in audit_page(many(1), stores={}, tokenizer=tokenizer)


def test_many_sources_have_an_overview_and_a_page_each(tokenizer, rows):
    manifests = many(29)
    manifests[3]["overlaps"] = {"test_prompt_in_train": 7}
    stores = {(m["source"], 1024): rows for m in manifests}
    pages = audit_pages(manifests, stores=stores, tokenizer=tokenizer, name="many")
    assert len(pages) == 30
    assert list(pages)[-1] == "many.html", "written when what it leads to is there"
    overview = Page(pages["many.html"])
    links = [attrs["href"] for tag, attrs in overview.tags if tag == "a"]
    assert set(links) == set(pages) - {"many.html"}
    assert sum(tag == "tr" for tag, _ in overview.tags) == 30
    line = pages["many.html"].partition(">source_03<")[2].partition("</tr>")[0]
    cells = ["1,024", "229", "11", "89,000", "3.4 %", "22.5 %", "20", "19", "7", "1 warning"]
    assert re.findall(r"<td>(.*?)</td>", line) == cells
    own = pages["many/source_03-1024.html"]
    assert "train holds the first question of 7 documents" in own
    assert "../many.html" in own
    assert "Rows, token by token" in own
    assert "first question" not in pages["many/source_04-1024.html"].split("Rows, token by token")[0]
    assert max(len(page.encode()) for page in pages.values()) < 60_000


def test_what_was_left_out_is_shown_with_its_beginning_and_reason(tokenizer):
    examples = {"too_short": [{"place": "line 3 of a.jsonl", "message": "has 2 words.", "text": HOSTILE}]}
    html = audit_page([manifest(examples=examples)], stores={}, tokenizer=tokenizer)
    cells = re.findall(r"<td>(.*?)</td>", html[html.index("How it begins") :])
    assert cells[:3] == ["too short", "line 3 of a.jsonl", "has 2 words."]
    assert "&lt;script&gt;" in cells[3]
    assert "<script" not in html
