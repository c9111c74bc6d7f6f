"""Tokenizers of each kind, trained in a moment: no class that a model's type brings may read them otherwise."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

from transformers import LlamaTokenizer, PreTrainedTokenizerBase, Qwen2Tokenizer

from tests.data import small_tokenizers
from tpu_experiments.config.task_schema import TokenizerTaskConfig
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.tasks.tokenizer.training import trained

REPOSITORY = Path(__file__).parents[2]
SHIPPED = str(REPOSITORY / "tpu_experiments" / "samples" / "tokenizer")
WIKI = REPOSITORY / "tpu_experiments" / "samples" / "wiki_ro.jsonl"
TEXTS = [json.loads(line)["text"] for line in WIKI.read_text(encoding="utf-8").splitlines()]


TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


def _of_task(kind: str, **settings: object) -> PreTrainedTokenizerBase:
    task = TokenizerTaskConfig(name="tokenizer", kind=kind, **({"vocab_size": 1000} | settings))  # type: ignore[arg-type]
    return trained(task, lambda: TEXTS)


def _of_class(kind: type[PreTrainedTokenizerBase], model: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer of a class with a splitting of its own, over the tokens of another."""
    state = json.loads(model.backend_tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in state["merges"]]
    ends = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return kind(vocab=state["vocab"], merges=merges, **ends)


KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte-level BPE, GPT-2's words": lambda: load_tokenizer(SHIPPED, revision=None, chat_template_path=None),
    "byte-level BPE, Llama 3's words": lambda: _of_task("bbpe"),
    "byte-level BPE, NFC": lambda: _of_task("bbpe", normalization="nfc", digits="single"),
    "byte-level BPE, Qwen 2's words and control tokens": lambda: _of_task(
        "bbpe", normalization="nfc", digits="single", additional_special_tokens=["<|endoftext|>", "<|im_end|>"]
    ),
    "SentencePiece's BPE": lambda: _of_task("spm_bpe"),
    "SentencePiece's BPE, a blank prepended": small_tokenizers.mistral,
    "SentencePiece's BPE, blanks split": small_tokenizers.gemma,
    "Unigram": lambda: _of_task("unigram"),
    "WordPiece": lambda: _of_task("wordpiece"),
    "DeBERTa's Unigram": lambda: _of_task("deberta_v3"),
    "LlamaTokenizer": lambda: _of_class(LlamaTokenizer, _of_task("spm_bpe")),
    "Qwen2Tokenizer": lambda: _of_class(Qwen2Tokenizer, small_tokenizers.byte_level()),
}


@cache
def made(kind: str) -> PreTrainedTokenizerBase:
    """A tokenizer of `KINDS` with a chat template; not to be changed."""
    tokenizer = KINDS[kind]()
    tokenizer.chat_template = tokenizer.chat_template or TEMPLATE
    return tokenizer
