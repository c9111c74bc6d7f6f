"""The shipped tokenizer."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from tpu_experiments.data.tokens.tokenizer import load_tokenizer

TOKENIZER = Path(__file__).parents[2] / "tpu_experiments" / "samples" / "tokenizer"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(str(TOKENIZER), revision=None, chat_template_path=None)
