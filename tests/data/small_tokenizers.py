"""Tokenizers built like those of the supported models, trained in a moment on a few sentences."""

import copy
import json

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIALS = ["<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
TURN_MARKERS = ["<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"]
SENTENCES = [
    "Care este capitala României? București, pe Dâmbovița.",
    "Răspunde scurt, în limba română: șase țări și un oraș.",
    "What is the capital of France? Paris, on the Seine.",
    "### Instruction:\nTranslate it.\n\n### Response:\nDa, desigur.\n\nUser: Assistant: <<SYS>>",
]
BLANK = "▁"
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def byte_level() -> PreTrainedTokenizerBase:
    """As of Llama 3: bytes, and offsets without the blanks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return _wrapped(tokenizer)


def mistral() -> PreTrainedTokenizerBase:
    """As of Mistral v0.1: a blank set before each piece of text, bytes for unknown characters."""
    prepended = normalizers.Sequence([normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)])
    return _sentencepiece(prepended, pre_tokenizer=None, strips_first_blank=True)


def gemma() -> PreTrainedTokenizerBase:
    """As of Gemma 3: blanks replaced, none set before a text."""
    blanks = pre_tokenizers.Split(" ", "merged_with_previous")
    return _sentencepiece(normalizers.Replace(" ", BLANK), pre_tokenizer=blanks, strips_first_blank=False)


def with_template(tokenizer: PreTrainedTokenizerBase, template: str, *markers: str) -> PreTrainedTokenizerBase:
    """A copy with this chat template and these special tokens."""
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    changed.add_special_tokens({"additional_special_tokens": list(markers)})
    return changed


def _sentencepiece(
    normalizer: normalizers.Normalizer, *, pre_tokenizer: pre_tokenizers.PreTokenizer | None, strips_first_blank: bool
) -> PreTrainedTokenizerBase:
    learner = Tokenizer(models.BPE(unk_token="<unk>"))
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=SPECIALS + byte_tokens, show_progress=False)
    learner.train_from_iterator(SENTENCES, trainer)
    state = json.loads(learner.to_str())
    state["model"] |= {"byte_fallback": True, "fuse_unk": True}
    state["pre_tokenizer"] = None
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in SPECIALS]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strips_first_blank)
    return _wrapped(tokenizer)


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
