"""Templates that write the day: training data has a fixed one, a prompt today's."""

from datetime import datetime

import pytest

from tests.data.small_tokenizers import byte_level, with_template
from tests.data.templates import CHATML
from tpu_experiments.data.documents import Document
from tpu_experiments.data.tokens import chat, sandbox
from tpu_experiments.data.tokens.chat import render_prompt
from tpu_experiments.data.tokens.tokenize import DocumentTokenizer

DATED = "{{ '<|im_start|>system\n' + strftime_now('%d %b %Y') + '<|im_end|>\n' }}" + CHATML
TURNS = (("user", "Ce zi e?"), ("assistant", "Vineri."))


class Later(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2031, 5, 4)


@pytest.fixture
def later(monkeypatch):
    """Another day."""
    monkeypatch.setattr(chat, "datetime", Later)
    monkeypatch.setattr(sandbox, "datetime", Later)


def tokens_of(tokenizer):
    [tokens] = DocumentTokenizer(tokenizer).tokenize([Document("d", messages=TURNS)])
    return tokens.ids.tolist()


def test_data_prepared_on_another_day_is_the_same(request):
    tokenizer = with_template(byte_level(), DATED)
    today = tokens_of(tokenizer)
    request.getfixturevalue("later")
    assert tokens_of(tokenizer) == today
    assert tokenizer.decode(today).startswith("<|im_start|>system\n26 Jul 2024<|im_end|>\n")


def test_a_prompt_has_the_day_on_which_it_is_asked(later):
    text = render_prompt(TURNS[:1], tokenizer=with_template(byte_level(), DATED))
    assert text.startswith("<|im_start|>system\n04 May 2031<|im_end|>\n")
