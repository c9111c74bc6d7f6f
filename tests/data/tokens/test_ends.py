"""What closes a text: BOS and EOS, or [CLS] and [SEP] of a tokenizer that has these in their place."""

import copy
from dataclasses import replace

import pytest

from tests.data.small_tokenizers import byte_level
from tpu_experiments.config.data_schema import DataSourceConfig
from tpu_experiments.data.documents import Document, SourceSpec
from tpu_experiments.data.steps import keys
from tpu_experiments.data.steps.keys import tokens_key
from tpu_experiments.data.tokens.tokenize import LEARN, DocumentTokenizer
from tpu_experiments.data.tokens.tokenizer import closing_texts, own_ends, text_end_ids
from tpu_experiments.training.evaluation import text_ids


@pytest.fixture(scope="module")
def of_bert():
    """A tokenizer with [CLS] and [SEP] alone."""
    made = copy.deepcopy(byte_level())
    made.bos_token = made.eos_token = None
    made.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
    return made


def ids_of(tokenizer, text):
    (tokens,) = DocumentTokenizer(tokenizer).tokenize([Document("d", text=text)])
    return tokens.ids.tolist(), (tokens.flags & LEARN).tolist()


def test_a_text_begins_with_cls_and_ends_with_sep(of_bert):
    first, last = of_bert.cls_token_id, of_bert.sep_token_id
    inner = of_bert("Un text.", add_special_tokens=False)["input_ids"]
    assert ids_of(of_bert, "Un text.") == ([first, *inner, last], [0, *[LEARN] * (len(inner) + 1)])
    assert ids_of(of_bert, "[CLS]Un text.[SEP]") == ids_of(of_bert, "Un text."), "ends that a text has are not doubled"
    assert text_ids(of_bert, "Un text.") == [first, *inner]
    assert own_ends(closing_texts(copy.deepcopy(of_bert))) == ([first], [last])


def test_bos_and_eos_come_first(of_bert):
    both = copy.deepcopy(byte_level())
    expected = ids_of(both, "Un text.")
    both.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
    assert ids_of(both, "Un text.") == expected
    assert text_end_ids(both) == (both.bos_token_id, both.eos_token_id)
    only_end = copy.deepcopy(byte_level())
    only_end.bos_token = None
    assert text_end_ids(only_end) == (None, only_end.eos_token_id)


def test_data_prepared_without_these_ends_has_another_key(of_bert, monkeypatch):
    """Keys of all other data are those of earlier versions."""
    text = SourceSpec("x", "rows.jsonl", format="text")
    labelled, chat = replace(text, label_field="kind"), replace(text, kind="chat", format="messages")
    cases = [(text, of_bert), (labelled, of_bert), (chat, of_bert), (text, byte_level()), (text, None)]

    def found():
        return [tokens_key(s, source=DataSourceConfig(), content=["a 1"], tokenizer=t) for s, t in cases]

    now = found()
    monkeypatch.setattr(keys, "_has_ends_of_bert", lambda *_, **__: False)
    before = found()
    assert [one == other for one, other in zip(now, before, strict=True)] == [False, True, True, True, True]
