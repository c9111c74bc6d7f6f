"""The tokenizer of a GGUF file as tokenizers has it: byte-level BPE, or SentencePiece's BPE with byte fallback.

What export/gguf_tokenizer.py writes is read back by this. transformers' own reader divides text into words by GPT-2's
rule where it does not know the file's (SmolLM's), and so gets other tokens.
"""

from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.storage.gguf.files import Header
from tpu_experiments.storage.gguf.settings import IDS, refusal, token_id
from tpu_experiments.storage.gguf.splits import (
    BLANK,
    CONTROL,
    DIGITS,
    GPT2,
    NORMAL,
    PRE_TOKENIZERS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)

OTHER_NAMES = {
    "default": "gpt-2",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "smaug-bpe": "dbrx",
}
"""Names of llama.cpp that stand for the same rule."""
BEGINS = {"llama-bpe", "tekken"}
"""Rules with which llama.cpp puts BOS before a text where the file does not say."""


def tokenizer_of(header: Header) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a file, with its special tokens and its chat template.

    Raises:
        ConfigError: it is of a kind that is not known here.
    """
    kinds: dict[str, Callable[[Header], tuple[Tokenizer, bool]]] = {"gpt2": _byte_level, "llama": _sentencepiece}
    kind = header.values.get("tokenizer.ggml.model")
    if kind not in kinds:
        raise refusal(header, f"its tokenizer is {kind!r:.40}, and {', '.join(kinds)} are known")
    try:
        backend, adds_begin = kinds[kind](header)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise refusal(header, f"its tokenizer lacks a part ({type(error).__name__}: {error!s:.60})") from error
    tokens = header.values["tokenizer.ggml.tokens"]
    _add_marked(backend, header)
    ids = {name: token_id(header, key) for name, key in IDS.items()}
    special = {f"{name}_token": tokens[index] for name, index in ids.items() if index is not None}
    _add_ends(backend, header, special, adds_begin=adds_begin)
    made: PreTrainedTokenizerFast = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **special
    )
    made.chat_template = header.values.get("tokenizer.chat_template")
    return made


def _used(header: Header) -> dict[str, int]:
    """Return the ids of tokens by their texts; rows of padding are UNUSED."""
    tokens, types = (header.values[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    return {text: index for index, (text, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED}


def _byte_level(header: Header) -> tuple[Tokenizer, bool]:
    name = header.values.get("tokenizer.ggml.pre", "default")
    known = OTHER_NAMES.get(name, name)
    rule = next((rule for rule, own in PRE_TOKENIZERS.items() if own == known), None)
    if rule is None:
        raise refusal(header, f"its tokenizer divides text by the rule {name!r:.40}, which is not known here")
    regex, takes_whole = rule
    merges = [tuple(merge.split(" ")) for merge in header.values["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(_used(header), merges, ignore_merges=takes_whole))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if regex == GPT2:
        backend.pre_tokenizer = whole
    elif regex == DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    else:
        parts = [
            pre_tokenizers.Split(Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    backend.decoder = decoders.ByteLevel()
    return backend, known in BEGINS


def _sentencepiece(header: Header) -> tuple[Tokenizer, bool]:
    """Return BPE whose merges are all pairs of tokens that make a token, the best score first, as llama.cpp joins."""
    tokens, types = (header.values[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    scores = header.values["tokenizer.ggml.scores"]
    vocab = _used(header)
    joins = {text for text, index in vocab.items() if types[index] == NORMAL}
    made = sorted((index for index in vocab.values() if types[index] == NORMAL), key=lambda index: -scores[index])
    merges = []
    for text in (tokens[index] for index in made):
        splits = ((text[:place], text[place:]) for place in range(1, len(text)))
        merges += [pair for pair in splits if pair[0] in joins and pair[1] in joins]
    unknown = next((text for text, index in vocab.items() if types[index] == UNKNOWN), None)
    backend = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    escape = normalizers.Replace(" ", BLANK)
    has_prefix = bool(header.values.get("tokenizer.ggml.add_space_prefix", True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), escape]) if has_prefix else escape
    back = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if has_prefix else back)
    return backend, True


def _add_marked(backend: Tokenizer, header: Header) -> None:
    """Add the tokens that are found in a text as they are."""
    types = header.values["tokenizer.ggml.token_type"]
    for text, index in _used(header).items():
        if types[index] in (CONTROL, USER_DEFINED, UNKNOWN):
            is_special = types[index] != USER_DEFINED
            add = backend.add_special_tokens if is_special else backend.add_tokens
            add([AddedToken(text, normalized=False, special=is_special)])


def _add_ends(backend: Tokenizer, header: Header, special: dict[str, str], *, adds_begin: bool) -> None:
    """Put BOS before and EOS behind a text, as far as the file says so."""
    asked = {"bos": adds_begin, "eos": False}
    names = {
        name: special[f"{name}_token"]
        for name, default in asked.items()
        if header.values.get(f"tokenizer.ggml.add_{name}_token", default) and f"{name}_token" in special
    }
    if not names:
        return
    begin, end = (f"{names[name]} " if name in names else "" for name in ("bos", "eos"))
    known = [(text, backend.token_to_id(text)) for text in names.values()]
    single = f"{begin}$A {end}".strip()
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} $B:1 {end}".strip(), special_tokens=known
    )
