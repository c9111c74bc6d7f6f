"""What a model is asked to write, and held-out documents as text."""

import numpy as np
import pytest

from tpu_experiments.data.documents import Document
from tpu_experiments.data.held_out import HeldOut
from tpu_experiments.data.steps.pack import flatten
from tpu_experiments.data.tokens.tokenize import DocumentTokenizer
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.training.evaluation import decoded_documents, exchanges

CHAT = (("user", "Ce este Dunărea?"), ("assistant", "Un fluviu."), ("user", "Lung?"), ("assistant", "Da, foarte."))
TEXT = "Dunărea este un fluviu.\n\nE lungă."


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tpu_experiments/samples/tokenizer", revision=None, chat_template_path=None)


def held_out(tokenizer, *documents, kind):
    tokens = DocumentTokenizer(tokenizer).tokenize(documents)
    return HeldOut("some", kind, flatten(tokens), len(documents))


def test_the_last_answer_is_asked_for_after_all_before_it(tokenizer):
    given = held_out(tokenizer, Document("0", messages=CHAT), Document("1", messages=CHAT[:2]), kind="chat")
    long, short = exchanges(given, tokenizer=tokenizer, num=9)
    assert (long.reference, short.reference) == ("Da, foarte.", "Un fluviu.")
    rendered = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in CHAT[:3]], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(long.prompt_ids) == rendered
    assert len(exchanges(given, tokenizer=tokenizer, num=1)) == 1


def test_documents_come_back_as_the_text_they_were(tokenizer):
    given = held_out(tokenizer, Document("0", text=TEXT), kind="text")
    assert decoded_documents(given, tokenizer=tokenizer) == [{"source": "some", "text": TEXT}]
    chat = held_out(tokenizer, Document("0", messages=CHAT[:2]), kind="chat")
    (record,) = decoded_documents(chat, tokenizer=tokenizer)
    assert record["reference"] == "Un fluviu."
    ids = tokenizer(record["prompt"], add_special_tokens=False)["input_ids"]
    np.testing.assert_array_equal(ids, exchanges(chat, tokenizer=tokenizer, num=1)[0].prompt_ids)
