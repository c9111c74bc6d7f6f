"""The memo of words gives the tokenizer's own ids and flags."""

import copy
import itertools
import unicodedata
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

from tests.data import small_tokenizers, templates
from tests.data.conversations import BUILT_IN, documents, real, rows
from tests.data.small_tokenizers import LLAMA3_WORDS, TURN_MARKERS
from tpu_experiments.data.documents import Document
from tpu_experiments.data.tokens import words
from tpu_experiments.data.tokens.chat import RenderedChat
from tpu_experiments.data.tokens.tokenize import DocumentTokenizer, flags_of
from tpu_experiments.data.tokens.words import backend_of, words_of

QWEN2_WORDS = LLAMA3_WORDS.replace("{1,3}", "")
TEMPLATES = ["CHATML", "QWEN25", "MISTRAL_V01", "MISTRAL_V03", "GEMMA3", "ALPACA", "PHI3"]
TEXT_FILES = {"ro_text.jsonl": "text", "uk_law.jsonl": "answer", "instruct_en.jsonl": "output"}


def split_by(tokenizer, pattern, *, normalizer=None, trims=None):
    """A copy with these words, as of Llama 3 and Qwen 2."""
    changed = copy.deepcopy(tokenizer)
    backend = changed.backend_tokenizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
    if normalizer is not None:
        backend.normalizer = normalizer
    if trims is not None:
        backend.post_processor = trims
    return changed


@pytest.fixture(
    scope="module", params=["shipped", "qwen", "qwen_that_trims", "llama3", "byte_level", "mistral", "gemma"]
)
def any_tokenizer(request, tokenizer):
    nfc = normalizers.NFC()
    match request.param:
        case "shipped":
            return tokenizer
        case "qwen":
            return split_by(tokenizer, QWEN2_WORDS, normalizer=nfc)
        case "qwen_that_trims":
            return split_by(tokenizer, QWEN2_WORDS, normalizer=nfc, trims=processors.ByteLevel(trim_offsets=True))
        case "llama3":
            trims = processors.Sequence([processors.ByteLevel(trim_offsets=True, add_prefix_space=False)])
            return split_by(tokenizer, LLAMA3_WORDS, trims=trims)
        case name:
            return getattr(small_tokenizers, name)()


@pytest.fixture(scope="module")
def memo(any_tokenizer):
    memo = words_of(any_tokenizer)
    assert memo is not None
    return memo


def check(memo, tokenizer, text, *, answers=(), cuts=()):
    """Compare one text; whether the memo gave its tokens."""
    mine, expected = memo.encode(text), backend_of(tokenizer).encode(text, add_special_tokens=False)
    if mine is None:
        return False
    assert mine.ids.tolist() == expected.ids
    assert [mine.token_to_chars(i) for i in range(len(mine))] == expected.offsets
    assert [mine.char_to_token(i) for i in range(len(text))] == [expected.char_to_token(i) for i in range(len(text))]
    rendered = RenderedChat(text, list(answers), list(cuts))
    assert flags_of(mine, rendered=rendered).tolist() == flags_of(expected, rendered=rendered).tolist()
    return True


# White space of all kinds, letters and numbers of all kinds, and characters newer than some library's tables.
CHARACTERS = (
    "\x00\t\x1c\x1f\x85\xa0\u180e\u200b\u200d\u2028\u3000\ufeff٣²ⅧİßﬆKſ日한🚀𝐀\U00011930\U0001e922\u0378\ufdd0\u2581"
)
MARKERS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_", "<unk>"]
PIECES = st.sampled_from(
    [
        *CHARACTERS,
        "'s",
        "'LL",
        "'ſ",
        "  ",
        "\n\n",
        "\r\n",
        " \n",
        "1234",
        " Ana",
        "e\u0301",
        "हिन्दी",
        "}\n",
        ". ",
        *MARKERS,
    ]
)
TEXTS = st.one_of(
    st.text(max_size=40), st.lists(st.one_of(PIECES, st.characters(exclude_categories=["Cs"]))).map("".join)
)


def test_random_texts(any_tokenizer, memo):
    @settings(deadline=None, max_examples=150)
    @given(text=TEXTS, data=st.data(), is_normal=st.booleans())
    def same(text, data, is_normal):
        text = unicodedata.normalize("NFC", text) if is_normal else text
        borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4, unique=True)))
        answers = list(itertools.pairwise(borders))[::2]
        check(memo, any_tokenizer, text, answers=answers, cuts=[end for _, end in answers if end < len(text)])

    same()


def test_parts_that_the_last_text_had_too(any_tokenizer, memo, monkeypatch):
    """The prompt of a pair is encoded once; a part at the beginning of a text may have another blank."""
    marker = max(any_tokenizer.added_tokens_encoder, key=len)
    prompt = f"Care este capitala?{marker}Paris, scurt."
    found = []
    searched = type("Searched", (), {"findall": lambda _, part: found.append(part) or words_of_part(part)})()
    words_of_part = memo._pipeline.words.findall
    monkeypatch.setattr(memo, "_pipeline", replace(memo._pipeline, words=searched))
    texts = [prompt + marker + "Da.", prompt + marker + "Nu.", f"Paris, scurt.{marker}Nu.{marker}Paris, scurt."]
    assert all(check(memo, any_tokenizer, text) for text in texts)
    parts = ["Care este capitala?", "Paris, scurt.", "Da.", "Nu."]
    assert [part for part in found if part in parts] == [*parts, "Paris, scurt."]
    assert check(memo, any_tokenizer, texts[0])


def test_a_full_memo_begins_anew(tokenizer, monkeypatch):
    monkeypatch.setattr(words, "_MAX_WORDS", 3)
    memo = words_of(tokenizer)
    text = "unu doi trei patru cinci șase " * 2 + "x" * 100
    for _ in range(2):
        assert check(memo, tokenizer, text, answers=[(4, 20), (25, 130)])
    assert len(memo._other) <= 3


def test_the_memo_takes_what_it_should(any_tokenizer, memo):
    assert check(memo, any_tokenizer, "Ștefan are 3 mere.\n\n\tȚara 漢字 🚀 'll")
    assert check(memo, any_tokenizer, "")
    assert check(memo, any_tokenizer, "<s></s> <|im_start|><|im_end|>\n")


def test_what_is_left_to_the_tokenizer(tokenizer):
    qwen = words_of(split_by(tokenizer, QWEN2_WORDS, normalizer=normalizers.NFC()))
    assert qwen.encode("e\u0301") is None  # the normalizer would compose it
    assert qwen.encode("é").ids.tolist() == tokenizer.backend_tokenizer.encode("é").ids
    for unknown in ("\u0378", "𐐷"):  # not assigned; a letter beyond the classes
        assert qwen.encode(f"a{unknown}") is None
        assert qwen.encode(f"b {unknown}") is None
        assert qwen.encode("a b").ids.tolist() == tokenizer.backend_tokenizer.encode("a b").ids
    assert words_of(small_tokenizers.mistral()).encode("a \u2581b") is None


def change(make, attribute, value):
    changed = make()
    setattr(changed.backend_tokenizer, attribute, value)
    return changed


def with_token(make, token):
    changed = make()
    changed.backend_tokenizer.add_tokens([token])
    return changed


BYTE_LEVEL, MISTRAL = small_tokenizers.byte_level, small_tokenizers.mistral
SPLIT_AT_BLANKS = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\s+"), "isolated"), pre_tokenizers.ByteLevel()])
UNKNOWN_PIPELINES = {
    "a prefix space": lambda: change(BYTE_LEVEL, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "another pattern": lambda: change(BYTE_LEVEL, "pre_tokenizer", SPLIT_AT_BLANKS),
    "digits apart": lambda: change(BYTE_LEVEL, "pre_tokenizer", pre_tokenizers.Digits()),
    "no words": lambda: change(BYTE_LEVEL, "pre_tokenizer", None),
    "lower case": lambda: change(BYTE_LEVEL, "normalizer", normalizers.Lowercase()),
    "other processor": lambda: change(BYTE_LEVEL, "post_processor", processors.BertProcessing(("</s>", 2), ("<s>", 1))),
    "not BPE": lambda: change(BYTE_LEVEL, "model", models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
    "metaspace": lambda: change(MISTRAL, "pre_tokenizer", pre_tokenizers.Metaspace()),
    "normalized token": lambda: with_token(BYTE_LEVEL, AddedToken("<t>", normalized=True)),
    "stripping token": lambda: with_token(BYTE_LEVEL, AddedToken("<t>", normalized=False, lstrip=True)),
    "token like a letter": lambda: with_token(MISTRAL, AddedToken("x y", normalized=False)),
}


@pytest.mark.parametrize("name", UNKNOWN_PIPELINES)
def test_other_pipelines_have_no_memo(name):
    assert words_of(UNKNOWN_PIPELINES[name]()) is None


def test_no_memo_for_a_vocabulary_with_a_blank_within_a_token():
    changed = MISTRAL()
    vocab = changed.backend_tokenizer.get_vocab(with_added_tokens=False)
    merges = [("a", "\u2581")]
    for token in ("a", "\u2581", "a\u2581"):
        vocab.setdefault(token, len(vocab))
    changed.backend_tokenizer.model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    assert changed.backend_tokenizer.encode("a b").tokens[1] == "a\u2581"
    assert words_of(changed) is None


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_under_every_template(any_tokenizer, name):
    tokenizer = small_tokenizers.with_template(any_tokenizer, getattr(templates, name), *TURN_MARKERS)
    same_documents(tokenizer, documents(BUILT_IN))


def test_real_texts_and_conversations(any_tokenizer, shared_data):
    tokenizer = small_tokenizers.with_template(any_tokenizer, templates.CHATML)
    chats = documents(list(real(shared_data))[::12])
    texts = [
        Document(f"{file}-{i}", text=row[field])
        for file, field in TEXT_FILES.items()
        for i, row in enumerate(rows(shared_data / file))
        if i % 12 == 0
    ]
    assert same_documents(tokenizer, chats + texts) > 0.9 * len(chats + texts)


def same_documents(tokenizer, some):
    """Compare with the tokens without a memo; how many texts the memo took."""
    with_memo, without = DocumentTokenizer(tokenizer), DocumentTokenizer(tokenizer)
    assert with_memo._words is not None
    without._words = None
    taken = []
    encode = with_memo._words.encode
    with_memo._words.encode = lambda text: taken.append(encode(text)) or taken[-1]
    for mine, expected in zip(with_memo.tokenize(some), without.tokenize(some), strict=True):
        if hasattr(expected, "ids"):
            assert mine.ids.tolist() == expected.ids.tolist()
            assert mine.flags.tolist() == expected.flags.tolist()
        else:
            assert mine == expected
    return sum(encoding is not None for encoding in taken)
