import subprocess
import sys

import pytest

from tests.data.conftest import TOKENIZER
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.tokens.tokenizer import (
    load_tokenizer,
    pad_id,
    require_chat_template,
    template_hash,
    tokenizer_hash,
)


def load(path, *, chat_template_path=None, chat_format="tokenizer"):
    return load_tokenizer(str(path), revision=None, chat_template_path=chat_template_path, chat_format=chat_format)


def test_shipped_tokenizer(tokenizer):
    assert len(tokenizer) == 4096
    assert max(tokenizer.get_vocab().values()) == 4095
    specials = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids(specials) == [0, 1, 2, 3, 4]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.model_max_length == 1024
    assert (TOKENIZER / "tokenizer.json").stat().st_size < 400_000
    text = "Bună ziua, „ș ț” 日本 🚀\n\tdouă  spații"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_path_from_the_repositorys_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(load("tpu_experiments/samples/tokenizer")) == 4096


def test_missing_folder(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    with pytest.raises(ConfigError, match=r"model\.tokenizer_path=.*Did you mean tokenizer in"):
        load(tmp_path / "tokeniser")


def test_folder_without_tokenizer(tmp_path):
    with pytest.raises(ConfigError, match=r"this folder holds no tokenizer \(.*point") as caught:
        load(tmp_path)
    assert caught.value.__cause__ is not None


def test_hub_out_of_reach():
    with pytest.raises(ConfigError, match=r"model\.tokenizer_path=org/none; the Hub gave no token"):
        load("org/none")


def test_own_chat_template(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages[0]['content'] }}")
    tokenizer = load(TOKENIZER, chat_template_path=str(path))
    turns = [{"role": "user", "content": "Bună"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "Bună"


def test_missing_chat_template(tmp_path):
    (tmp_path / "chat.jinja").touch()
    with pytest.raises(ConfigError, match=r"model\.chat_template_path=.*Did you mean chat\.jinja"):
        load(TOKENIZER, chat_template_path=str(tmp_path / "chta.jinja"))


def test_chat_source_needs_a_chat_template(tokenizer):
    require_chat_template(tokenizer, source="x")
    bare = load(TOKENIZER)
    bare.chat_template = None
    with pytest.raises(
        ConfigError, match=r"^data\.x\.kind=chat; .*model\.chat_format=chatml .*chat_template_path=FILE"
    ):
        require_chat_template(bare, source="x")


def test_a_file_and_a_named_format(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^model\.chat_template_path=x\.jinja with model\.chat_format=plain; .*leave"
    ):
        load(TOKENIZER, chat_template_path="x.jinja", chat_format="plain")


def test_hash_of_the_tokenizer():
    tokenizer = load(TOKENIZER)
    expected = tokenizer_hash(tokenizer)
    assert len(expected) == 16
    assert int(expected, 16) > 0
    tokenizer("a b c", truncation=True, max_length=2, padding="max_length")
    tokenizer.chat_template = "other"
    assert tokenizer_hash(tokenizer) == expected == tokenizer_hash(load(TOKENIZER))
    tokenizer.eos_token = "<|im_end|>"
    assert tokenizer_hash(tokenizer) != expected
    more = load(TOKENIZER)
    more.add_tokens(["<think>"])
    assert tokenizer_hash(more) != expected


def test_hash_of_the_template():
    tokenizer = load(TOKENIZER)
    own = template_hash(tokenizer)
    assert len(own) == 16
    assert template_hash(load(TOKENIZER, chat_format="plain")) != own
    tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    assert template_hash(tokenizer) not in (own, "none")
    tokenizer.chat_template = None
    assert template_hash(tokenizer) == "none"


def test_pad_id():
    tokenizer = load(TOKENIZER)
    assert pad_id(tokenizer) == 0
    tokenizer.pad_token = None
    assert pad_id(tokenizer) == 2
    tokenizer.eos_token = None
    assert pad_id(tokenizer) == 0


def test_tokenizing_never_loads_torch_xla():
    code = f"""
import sys
from tpu_experiments.data.documents import Document
from tpu_experiments.data.prepare import prepare
from tpu_experiments.data.reading.sources import read_documents
from tpu_experiments.data.tokens.tokenize import DocumentTokenizer
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
tokenizer = load_tokenizer({str(TOKENIZER)!r}, revision=None, chat_template_path=None)
chat = Document("1", messages=(("user", "a"), ("assistant", "b")))
DocumentTokenizer(tokenizer).tokenize([chat])
assert "torch_xla" not in sys.modules
assert "datasets" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=TOKENIZER.parents[2], timeout=120)
