"""Bytes of text that tokens stand for: those of whole texts, for every family of tokenizers."""

import json
import unicodedata

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.data.small_tokenizers import byte_level, gemma, mistral
from tests.tiers import only
from tpu_experiments.data.documents import Document
from tpu_experiments.data.tokens.tokenize import LEARN, DocumentTokenizer
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.data.tokens.widths import widths_of

TEXTS = (
    "Care este capitala României? București, pe Dâmbovița.",
    "  two blanks, a tab\t, a line\nand \u2581 itself",
    "漢字 🚀 é e\u0301 \x07 ",
    "a",
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def shipped():
    return load_tokenizer("tpu_experiments/samples/tokenizer", revision=None, chat_template_path=None)


FAMILIES = {"byte_level": byte_level, "mistral": mistral, "gemma": gemma, "shipped": shipped}


def text_bytes(tokenizer, text):
    """By the tokens of a text document."""
    (tokens,) = DocumentTokenizer(tokenizer).tokenize([Document("0", text=text)])
    return int(widths_of(tokenizer).of(tokens.ids).sum())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_has_the_bytes_of_its_tokens(family, text):
    tokenizer = FAMILIES[family]()
    normalizer = json.loads(tokenizer.backend_tokenizer.to_str())["normalizer"] or {}
    expected = unicodedata.normalize("NFC", text) if normalizer.get("type") == "NFC" else text
    if family in ("mistral", "gemma"):
        expected = expected.replace("\u2581", " ")  # it cannot tell the two apart
    assert text_bytes(tokenizer, text) == len(expected.encode())


@pytest.mark.parametrize("family", only(["shipped", "mistral"], FAMILIES))
def test_real_texts_have_the_bytes_of_their_tokens(family, shared_data):
    tokenizer = FAMILIES[family]()
    lines = (shared_data / "ro_text.jsonl").read_text(encoding="utf-8").splitlines()[:40]
    for text in (json.loads(line)["text"].strip() for line in lines):
        assert text_bytes(tokenizer, text) == len(text.encode())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_has_the_bytes_of_its_text(family):
    tokenizer = FAMILIES[family]()
    tokenizer.chat_template = TEMPLATE
    answers = ("Paris, on the Seine.", "șase țări")
    turns = [("user", "What is it?"), ("assistant", answers[0]), ("user", "Și?"), ("assistant", answers[1])]
    (tokens,) = DocumentTokenizer(tokenizer).tokenize([Document("0", messages=tuple(turns))])
    is_learnt = (tokens.flags & LEARN) > 0
    widths = widths_of(tokenizer)
    markers = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ends = 0 if widths.bytes_V[markers] == 0 else 2 * len("<|im_end|>")
    assert int(widths.of(tokens.ids)[is_learnt].sum()) - ends == sum(len(a.encode()) for a in answers)


def test_special_tokens_stand_for_no_text():
    tokenizer = gemma()
    widths = widths_of(tokenizer)
    ids = np.array([tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id], np.int32)
    assert widths.of(ids).tolist() == [0, 0, 0]
    assert not widths.is_text(ids).any()
    assert widths.is_text(np.array(tokenizer.encode("Paris", add_special_tokens=False))).all()


def test_rows_are_read_as_documents_are():
    tokenizer = mistral()
    widths = widths_of(tokenizer)
    tokens = DocumentTokenizer(tokenizer).tokenize([Document(str(i), text=t) for i, t in enumerate(TEXTS[:2])])
    row = np.concatenate([each.ids for each in tokens])[None]
    np.testing.assert_array_equal(widths.of(row)[0], np.concatenate([widths.of(each.ids) for each in tokens]))


def test_a_tokenizer_of_another_kind_has_none():
    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(TEXTS, trainers.WordPieceTrainer(special_tokens=["[UNK]"], show_progress=False))
    words.decoder = decoders.WordPiece()
    assert widths_of(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")) is None
