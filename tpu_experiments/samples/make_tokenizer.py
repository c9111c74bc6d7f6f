"""Train the shipped tokenizer on the shipped samples: byte-level BPE of 4,096 entries, ChatML.

    python tpu_experiments/samples/make_tokenizer.py

writes samples/tokenizer/. The same samples yield the same bytes.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SAMPLES = Path(__file__).parent
VOCAB_SIZE = 4096
MAX_LENGTH = 1024  # max_position_embeddings of conf/model/tiny.yaml
SPECIALS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
# The template writes BOS, so that every user of it, this project or another, starts with the same tokens.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def sample_texts() -> Iterator[str]:
    """Yield every text field of the three samples, in file order."""
    with (SAMPLES / "wiki_ro.jsonl").open(encoding="utf-8") as lines:
        yield from (json.loads(line)["text"] for line in lines)
    for row in json.loads((SAMPLES / "ultrachat_ro.json").read_text(encoding="utf-8")):
        yield from row["data"]
    with (SAMPLES / "uk_law.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            yield from (text for field, text in json.loads(line).items() if field != "id")


def train(texts: Iterator[str]) -> Tokenizer:
    """Train a byte-level BPE of exactly `VOCAB_SIZE` entries; reserved tokens fill the remainder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    missing = VOCAB_SIZE - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<|reserved_{i}|>" for i in range(missing)])
    return tokenizer


def write(folder: Path) -> None:
    """Train the tokenizer and save its three files into `folder`."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train(sample_texts()),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=MAX_LENGTH,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    assert len(tokenizer) == VOCAB_SIZE, f"{len(tokenizer)} entries, not {VOCAB_SIZE}"
    assert tokenizer.convert_tokens_to_ids(SPECIALS) == list(range(len(SPECIALS)))
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {len(tokenizer)} entries")


if __name__ == "__main__":
    write(SAMPLES / "tokenizer")
