"""The chat templates that are shipped for tokenizers without one."""

import copy
import itertools
import re

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.data.conftest import TOKENIZER
from tests.data.small_tokenizers import mistral
from tests.data.tokens.test_training_formats import MISTRAL, OWN
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import ModelConfig
from tpu_experiments.data.documents import Document
from tpu_experiments.data.tokens.tokenize import LEARN, DocumentTokenizer
from tpu_experiments.data.tokens.tokenizer import CHAT_FORMATS, load_tokenizer

FORMATS = ("chatml", "instruction_response", "llama2", "plain", "raw")
CHAT = (
    ("system", "Răspunde scurt."),
    ("user", "Care este capitala?"),
    ("assistant", "București."),
    ("user", "Dar a Franței?"),
    ("assistant", "Paris."),
)
TEXTS = {
    "chatml": (
        "<s><|im_start|>system\nRăspunde scurt.<|im_end|>\n<|im_start|>user\nCare este capitala?<|im_end|>\n"
        "<|im_start|>assistant\nBucurești.<|im_end|>\n<|im_start|>user\nDar a Franței?<|im_end|>\n"
        "<|im_start|>assistant\nParis.<|im_end|>\n"
    ),
    "instruction_response": (
        "<s>Răspunde scurt.\n\n### Instruction:\nCare este capitala?\n\n### Response:\nBucurești.</s>\n\n"
        "### Instruction:\nDar a Franței?\n\n### Response:\nParis.</s>\n\n"
    ),
    "llama2": (
        "<s>[INST] <<SYS>>\nRăspunde scurt.\n<</SYS>>\n\nCare este capitala? [/INST] București. </s>"
        "<s>[INST] Dar a Franței? [/INST] Paris. </s>"
    ),
    "plain": (
        "<s>Răspunde scurt.\n\nUser: Care este capitala?\nAssistant: București.</s>\n"
        "User: Dar a Franței?\nAssistant: Paris.</s>\n"
    ),
    "raw": "<s>Răspunde scurt.Care este capitala?București.</s>Dar a Franței?Paris.</s>",
}
LEARNT = {
    "chatml": ["București.<|im_end|>", "Paris.<|im_end|>"],
    "instruction_response": ["București.</s>", "Paris.</s>"],
    "llama2": [" București. </s>", " Paris. </s>"],
    "plain": [" București.</s>", " Paris.</s>"],
    "raw": ["București.</s>", "Paris.</s>"],
}


def load(path=TOKENIZER, *, chat_format):
    return load_tokenizer(str(path), revision=None, chat_template_path=None, chat_format=chat_format)


def learnt(tokens, *, tokenizer):
    pairs = itertools.groupby(zip(tokens.flags & LEARN, tokens.ids, strict=True), key=lambda pair: pair[0])
    return [tokenizer.decode([token for _, token in run]) for is_learnt, run in pairs if is_learnt]


@pytest.mark.parametrize("chat_format", FORMATS)
def test_text_and_mask(chat_format):
    tokenizer = load(chat_format=chat_format)
    [tokens] = DocumentTokenizer(tokenizer).tokenize([Document("d", messages=CHAT)])
    assert tokenizer.decode(tokens.ids) == TEXTS[chat_format]
    assert learnt(tokens, tokenizer=tokenizer) == LEARNT[chat_format]


@pytest.mark.parametrize("chat_format", FORMATS)
def test_a_prompt_is_the_start_of_its_conversation(chat_format):
    """So that what is generated from begins as what was learnt did."""
    tokenizer = load(chat_format=chat_format)
    messages = [{"role": role, "content": content} for role, content in CHAT]
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    [tokens] = DocumentTokenizer(tokenizer).tokenize([Document("d", messages=CHAT)])
    last_question = np.flatnonzero(tokens.flags & LEARN == 0)
    last_question = last_question[last_question < np.flatnonzero(tokens.flags & LEARN)[-1]]
    assert prompt == tokens.ids[: last_question[-1] + 1].tolist()


def test_chatml_for_a_tokenizer_without_its_tokens(tmp_path):
    tokenizer = mistral()
    backend = tokenizer.backend_tokenizer
    assert "<|im_start|>" in tokenizer.get_added_vocab()
    tokenizer.save_pretrained(tmp_path)
    rename(tmp_path / "tokenizer.json")
    tokenizer = load(tmp_path, chat_format="chatml")
    [tokens] = DocumentTokenizer(tokenizer).tokenize([Document("d", messages=CHAT[1:])])
    assert backend.token_to_id("<|im_end|>") not in tokens.ids
    assert learnt(tokens, tokenizer=tokenizer) == ["București.<|im_end|></s>", "Paris.<|im_end|></s>"]


def rename(path):
    path.write_text(path.read_text().replace("<|im_start|>", "<|other|>").replace("<|im_end|>", "<|another|>"))


def test_the_format_of_the_tokenizer_is_its_own():
    assert load(chat_format="tokenizer").chat_template == AutoTokenizer.from_pretrained(TOKENIZER).chat_template


@pytest.mark.parametrize("chat_format", FORMATS)
def test_without_bos_and_eos(chat_format, tmp_path):
    bare = copy.deepcopy(load(chat_format="tokenizer"))
    bare.bos_token = bare.eos_token = None
    bare.save_pretrained(tmp_path)
    if chat_format != "chatml":
        with pytest.raises(ConfigError, match=rf"^model\.chat_format={chat_format}; answers end with EOS"):
            load(tmp_path, chat_format=chat_format)
        return
    tokenizer = load(tmp_path, chat_format=chat_format)
    [tokens] = DocumentTokenizer(tokenizer).tokenize([Document("d", messages=CHAT)])
    assert tokenizer.decode(tokens.ids) == TEXTS["chatml"].removeprefix("<s>")


def test_every_format_of_the_config_has_a_file():
    choices = set(ModelConfig.__dataclass_fields__["chat_format"].metadata["allowed"])
    families = {*OWN, *MISTRAL}
    assert choices - {"tokenizer"} == {*FORMATS, *families}
    assert {path.stem for path in CHAT_FORMATS.iterdir()} == {*FORMATS, "chatml_as_text", *families}


@pytest.mark.parametrize(("chat_format", "mark"), [("gemma3", "<start_of_turn>"), ("llama3_1", "<|start_header_id|>")])
def test_a_format_of_another_family_is_refused(chat_format, mark):
    with pytest.raises(
        ConfigError, match=rf"^model\.chat_format={chat_format}; .* has no token {re.escape(mark)}, .*chatml"
    ):
        load(chat_format=chat_format)
    assert load(chat_format="qwen3").chat_template  # the shipped tokenizer has its marks
