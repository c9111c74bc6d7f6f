import re
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from tpu_experiments.data.audit.rows import TOKENS_SHOWN, choose_rows, decode_groups, row_html
from tpu_experiments.data.rows import Rows, empty, padding

TEXTS = ["Bună ziua, țări și șase „da”.", "😀 日本語 și 👩‍👩‍👧", "a\n\n\tb  c", " �x", "\x00\x1b", "ș" * 40]


@pytest.fixture(scope="module")
def sentencepiece():
    """Pieces with ▁ for a blank and bytes for the rest, as in Llama 2 and Mistral."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdef", "▁a", "▁ab"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁a", "b")], unk_token="<unk>", byte_fallback=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>")


def encode(text, tokenizer):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("text", TEXTS)
def test_the_groups_say_the_text_and_leave_no_token_out(text, tokenizer):
    ids = encode(text, tokenizer)
    groups = decode_groups(ids, tokenizer=tokenizer)
    assert "".join(group.text for group in groups) == tokenizer.decode(ids) == text
    assert [group.begin for group in groups] + [len(ids)] == [0] + [group.end for group in groups]


def test_tokens_of_one_character_are_one_group_and_others_are_alone(tokenizer):
    ids = encode("da 😀 nu", tokenizer)
    groups = decode_groups(ids, tokenizer=tokenizer)
    shared = [group for group in groups if group.end - group.begin > 1]
    assert [group.text.strip() for group in shared] == ["😀"]
    assert len(groups) < len(ids)


def test_blanks_between_pieces_are_kept_and_bytes_make_characters(sentencepiece):
    ids = encode("ab a ș😀 c", sentencepiece)
    groups = decode_groups(ids, tokenizer=sentencepiece)
    assert [group.text for group in groups] == ["ab", " a", " ", "ș", "😀", " ", "c"]


def test_a_character_that_is_cut_off_does_not_eat_the_special_token_after_it(tokenizer):
    ids = [*encode("😀", tokenizer)[:2], tokenizer.eos_token_id]
    cut, special = decode_groups(ids, tokenizer=tokenizer)
    assert (cut.begin, cut.end, cut.is_special) == (0, 2, False)
    assert (special.text, special.is_special) == ("</s>", True)


class Spans(HTMLParser):
    """Classes and texts of the token spans."""

    def __init__(self, html):
        super().__init__()
        self.tokens, self.titles, self.marks, self.open = [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        classes = (attributes.get("class") or "").split()
        self.open.append(classes)
        if "t" in classes:
            self.tokens.append(["learnt" in classes, ""])
            self.titles.append(attributes["title"])

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        self.open.pop()

    def handle_data(self, data):
        if any("t" in classes for classes in self.open) and "sign" not in self.open[-1]:
            self.tokens[-1][1] += data
        if self.open and "mark" in self.open[-1]:
            self.marks.append(data)


def row_of(texts, tokenizer, *, seq_len):
    """Texts as the segments of one row; every second token is learnt."""
    rows = padding(1, seq_len=seq_len)
    begin = 0
    for number, text in enumerate(texts):
        ids = encode(text, tokenizer)
        end = begin + len(ids)
        rows.ids_NT[0, begin:end] = ids
        rows.segments_NT[0, begin:end] = number + 1
        rows.positions_NT[0, begin:end] = np.arange(len(ids))
        rows.learn_NT[0, begin + 1 : end : 2] = True
        begin = end
    return rows


def test_every_token_is_a_span_and_exactly_the_learnt_ones_are_marked(tokenizer):
    texts = ["Bună ziua\n<script>alert('ș')</script>", "😀 & <b>", "<|im_start|>user"]
    rows = row_of(texts, tokenizer, seq_len=96)
    html = row_html(rows, tokenizer=tokenizer)
    spans = Spans(html)
    assert [learnt for learnt, _ in spans.tokens] == rows.learn_NT[0, : rows.num_tokens].tolist()
    assert "".join(text for _, text in spans.tokens) == "".join(texts)
    assert not re.findall(r"<(?!/?(?:span|div|svg|rect|line|i)\b)|&(?!(?:lt|gt|amp|quot|#x27);)", html)
    positions = [int(title.split("position ")[1].split(",")[0].split(";")[0]) for title in spans.titles]
    assert positions == rows.positions_NT[0, : rows.num_tokens].tolist()


def test_text_in_a_title_is_escaped(tokenizer):
    # U+FFFD looks like an unfinished character, so the quotation mark after it shares its title.
    html = row_html(row_of(['\ufffd"><b>'], tokenizer, seq_len=16), tokenizer=tokenizer)
    assert "of “\ufffd&quot;" in html


def test_every_segment_and_the_padding_are_named(tokenizer):
    rows = row_of(["unu", "doi trei", "x"], tokenizer, seq_len=64)
    html = row_html(rows, tokenizer=tokenizer)
    lengths = [int((rows.segments_NT == number).sum()) for number in (1, 2, 3)]
    plural = ["" if length == 1 else "s" for length in lengths]
    expected = [f"segment {i + 1} · from position 0 · {n} token{plural[i]}" for i, n in enumerate(lengths)]
    assert Spans(html).marks == expected
    assert f"{64 - sum(lengths)} tokens of padding" in unescape(html)
    assert html.count('<div class="segment">') == 3
    # One line in the band for each end of a segment.
    assert html.count("<line ") == 3


def test_a_full_row_has_no_padding_and_a_long_one_is_cut(tokenizer):
    (token,) = encode("a", tokenizer)
    shape = (1, TOKENS_SHOWN + 5)
    positions = np.arange(shape[1], dtype=np.int32)[None]
    rows = Rows(np.full(shape, token, np.int32), np.zeros(shape, bool), positions, np.ones(shape, np.int32))
    html = row_html(rows, tokenizer=tokenizer)
    assert "padding" not in html
    assert "and 5 tokens more, not shown" in html
    assert len(Spans(html).tokens) == TOKENS_SHOWN
    rows.segments_NT[0, TOKENS_SHOWN + 2 :] = 2
    rows.segments_NT[0, 10:20] = 2
    html = row_html(rows, tokenizer=tokenizer)
    assert len(Spans(html).marks) == 3
    assert len(Spans(html).tokens) == TOKENS_SHOWN


def sample_rows(num_rows):
    """Rows of 8 tokens with one segment and 4 learnt tokens each."""
    rows = padding(num_rows, seq_len=8)
    rows.segments_NT[:] = 1
    rows.learn_NT[:, 4:] = True
    return rows


def test_the_rows_shown_are_the_telling_ones():
    rows = sample_rows(100)
    rows.segments_NT[70, 4:] = 2
    rows.learn_NT[30, 5:] = False
    assert choose_rows(rows, num_rows=4) == [
        (70, "with the most segments"),
        (0, "the first"),
        (50, "from the middle"),
        (30, "with the smallest supervised share"),
    ]
    assert [index for index, _ in choose_rows(rows, num_rows=6)][4:] == [99, 98]


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 10, 64, 65, 300])
def test_no_row_is_shown_twice_however_few_there_are(num_rows):
    rows = sample_rows(num_rows) if num_rows else empty(8)
    chosen = [index for index, _ in choose_rows(rows, num_rows=4)]
    assert len(chosen) == len(set(chosen)) == min(4, num_rows)
    assert all(0 <= index < num_rows for index in chosen)


def test_a_large_store_is_read_at_four_places_only():
    class Store:
        num_rows, seq_len = 10**6, 8

        def take(self, index):
            assert len(index) <= 256
            return sample_rows(len(index))

    assert len(choose_rows(Store(), num_rows=4)) == 4
