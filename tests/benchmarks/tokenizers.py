"""Tokens per word of task=tokenizer beside SentencePiece's own trainer, at equal vocabulary on the same text.

    python -m tests.benchmarks.tokenizers                                   # shared/data/ro_text.jsonl, 4,000 to 16,000
    python -m tests.benchmarks.tokenizers FILE 8000,32000

The texts of FILE are split by the hash that training uses: 80 % are trained on, 20 % measured. SentencePiece reads the
same training texts line by line with its defaults and `byte_fallback`; both encode the held-out lines one by one.
"""

import hashlib
import io
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import sentencepiece
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.task_schema import KINDS, TokenizerTaskConfig
from tpu_experiments.data.cleaning.duplicates import content_key
from tpu_experiments.data.cleaning.split import SPLITS, split_codes
from tpu_experiments.data.documents import Document
from tpu_experiments.tasks.tokenizer.measures import encoded
from tpu_experiments.tasks.tokenizer.training import trained

FILE = Path(__file__).parents[3] / "shared" / "data" / "ro_text.jsonl"
SIZES = (4000, 8000, 16000)
MODELS = {"spm_bpe": "bpe", "unigram": "unigram"}
"""SentencePiece's names of the kinds that it has."""


def texts_of(file: Path) -> tuple[list[str], list[str]]:
    """Texts to train on, and held-out lines that are not blank."""
    texts = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
    keys = b"".join(content_key(Document("", text=text))[:8] for text in texts)
    codes = split_codes(np.frombuffer(keys, np.uint64), eval_fraction=0.1, test_fraction=0.1)
    train = [text for text, code in zip(texts, codes, strict=True) if SPLITS[code] == "train"]
    held_out = [text for text, code in zip(texts, codes, strict=True) if SPLITS[code] != "train"]
    return train, [line for text in held_out for line in text.split("\n") if line.strip()]


def ours(kind: str, *, vocab_size: int, texts: list[str], **settings: object) -> PreTrainedTokenizerBase:
    """A tokenizer of task=tokenizer, not rounded up."""
    values = {"digits": "any", "min_frequency": 0, "additional_special_tokens": [], **settings}
    task = TokenizerTaskConfig(name="tokenizer", kind=kind, vocab_size=vocab_size, pad_vocab_to_multiple_of=1, **values)  # type: ignore[arg-type]
    return trained(task, lambda: texts)


def theirs(kind: str, *, vocab_size: int, texts: Iterable[str]) -> sentencepiece.SentencePieceProcessor:
    """SentencePiece's own, with its defaults and bytes; and the four special tokens of ours."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in texts for line in text.split("\n") if line.strip()]),
        model_writer=model,
        model_type=MODELS[kind],
        vocab_size=vocab_size,
        byte_fallback=True,
        pad_id=3,
        max_sentence_length=2**20,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def comparison(kind: str, *, vocab_size: int, file: Path) -> tuple[float, float]:
    """Tokens per word on the held-out lines: ours, and SentencePiece's."""
    texts, lines = texts_of(file)
    words = sum(len(line.split()) for line in lines)
    own = ours(kind, vocab_size=vocab_size, texts=texts)
    other = theirs(kind, vocab_size=vocab_size, texts=texts)
    assert len(own) == other.vocab_size() == vocab_size
    return sum(map(len, encoded(own, lines))) / words, sum(map(len, other.encode(lines))) / words


def main(file: Path, sizes: Iterable[int]) -> None:
    """Print both tables."""
    print("| vocabulary | kind | tokens/word | SentencePiece | ratio |\n|---|---|---|---|---|", flush=True)
    for size in sizes:
        for kind in MODELS:
            own, other = comparison(kind, vocab_size=size, file=file)
            print(f"| {size:,} | {kind} | {own:.4f} | {other:.4f} | {own / other:.4f} |", flush=True)
    texts, lines = texts_of(file)
    size, words = sum(len(text.encode()) for text in texts), sum(len(line.split()) for line in lines)
    print(
        f"\n{size / 1e6:.2f} MB, vocabulary 8,000\n| kind | tokens/word | seconds | tokenizer.json |\n|---|---|---|---|"
    )
    for kind in KINDS:
        started = time.perf_counter()
        tokenizer = ours(kind, vocab_size=8000, texts=texts)
        seconds = time.perf_counter() - started
        digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:12]
        fertility = sum(map(len, encoded(tokenizer, lines))) / words
        print(f"| {kind} | {fertility:.4f} | {seconds:.1f} | `{digest}` |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE, map(int, sys.argv[2].split(",")) if sys.argv[2:] else SIZES)
