"""The shipped tokenizer is what its script makes of the shipped samples."""

import runpy

import pytest

from tests.data.conftest import TOKENIZER

SCRIPT = runpy.run_path(str(TOKENIZER.parent / "make_tokenizer.py"))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_tokenizer_is_reproduced_byte_for_byte(tmp_path, name):
    SCRIPT["write"](tmp_path)
    assert (tmp_path / name).read_bytes() == (TOKENIZER / name).read_bytes(), (
        "a sample has changed; run python tpu_experiments/samples/make_tokenizer.py"
    )


def test_a_small_sample_is_filled_up_with_reserved_entries():
    made = SCRIPT["train"](iter(["prea puțin", "prea puțin"]))
    assert made.get_vocab_size() == SCRIPT["VOCAB_SIZE"]
    assert made.token_to_id("<|reserved_0|>") is not None
