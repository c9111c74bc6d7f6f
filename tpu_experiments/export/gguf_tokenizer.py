"""A tokenizer as llama.cpp holds it: tokens with types, merges or scores, and the name of its way to split text.

Two kinds are written. Byte-level BPE (GPT-2, Llama 3, Qwen) becomes the tokenizer `gpt2` with merges; llama.cpp has its
own code for each way to split text before the merges, chosen by a name, which is found here by the regular expression
in tokenizer.json. BPE with byte fallback (SentencePiece's, as in Mistral, Llama 2 and Gemma) becomes the tokenizer
`llama` with scores.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.storage.gguf.splits import (
    APPROXIMATE,
    BLANK,
    BYTE,
    CONTROL,
    DIGITS,
    GPT2,
    NORMAL,
    PRE_TOKENIZERS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)

if TYPE_CHECKING:
    from gguf import GGUFWriter

BYTES = [f"<0x{value:02X}>" for value in range(256)]


@dataclass(frozen=True)
class Vocabulary:
    """What is written of a tokenizer."""

    model: str
    """`gpt2` or `llama`."""
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] = field(default_factory=list)
    """Of `llama`: minus the rank of the merge that makes a token."""
    merges: list[str] = field(default_factory=list)
    """Of `gpt2`."""
    add_space_prefix: bool = False
    """Of `llama`: whether a blank is put before a text."""
    doubles_blank: bool = False
    """Whether llama.cpp puts it also before a text that begins with one, and the tokenizer does not."""
    ids: Mapping[str, int] = field(default_factory=dict)
    """Token ids by `bos`, `eos`, `eot`, `eom`, `unk`, `pad`."""
    adds: Mapping[str, bool] = field(default_factory=dict)
    """Whether `bos` and `eos` are put around a text."""
    chat_template: str | list[dict[str, str]] | None = None
    notes: tuple[str, ...] = ()
    """What llama.cpp does in another way, a sentence each."""

    def add_to(self, writer: "GGUFWriter") -> None:
        """Add the metadata of the tokenizer."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.model == "gpt2":
            writer.add_token_merges(self.merges)
        else:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.add_space_prefix)
        for name, index in self.ids.items():
            getattr(writer, f"add_{name}_token_id")(index)
        for name, is_added in self.adds.items():
            getattr(writer, f"add_add_{name}_token")(is_added)
        if self.chat_template:
            writer.add_chat_template(self.chat_template)


def vocabulary_of(
    tokenizer: PreTrainedTokenizerBase, *, config: PretrainedConfig, ends: Sequence[int] = ()
) -> Vocabulary:
    """Return the tokenizer for a model of `config`, whose vocabulary may be larger.

    Args:
        ends: `eos_token_id` of the model's generation_config.json.

    Raises:
        ConfigError: llama.cpp has no such tokenizer, or the model has fewer tokens.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refusal(f"{type(tokenizer).__name__} has no tokenizer.json")
    spec: dict[str, Any] = json.loads(backend.to_str())
    model = spec["model"]
    if model.get("type") != "BPE":
        raise _refusal(f"its model is {model.get('type')}, not BPE")
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(name):
            raise _refusal(f"its BPE has {name}={model[name]!r}")
    size = int(config.vocab_size)
    named = {token["content"] for token in spec["added_tokens"]}
    largest = max((index for text, index in model["vocab"].items() if text not in named), default=0)
    if largest >= size:
        raise _refusal(f"it has token {largest}, and the model's embedding ends at {size - 1}")
    ids = _special_ids(tokenizer, config)
    further = [index for index in dict.fromkeys(ends) if index != ids.get("eos") and 0 <= index < size]
    # llama.cpp stops at these three kinds of ends, and at further tokens that it knows by their text.
    ids |= dict(zip(("eot", "eom"), further, strict=False))
    common: dict[str, Any] = {
        "ids": ids,
        "adds": _added_around(tokenizer),
        "chat_template": _templates(tokenizer.chat_template),
    }
    found = _sentencepiece(spec, size, common) if model.get("byte_fallback") else _byte_level(spec, size, common)
    if not further[2:]:
        return found
    note = f"llama.cpp stops at three end tokens of a file; {further[2:]} of generation_config.json are left out."
    return replace(found, notes=(*found.notes, note))


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"task.forms has gguf, and llama.cpp has no such tokenizer: {what}; leave gguf out of task.forms, or take a "
        "model with byte-level BPE (GPT-2, Llama 3, Qwen) or SentencePiece's BPE with byte fallback (Mistral, Gemma)."
    )


def _special_ids(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> dict[str, int]:
    """Return the ids that exist. Where the tokenizer names none, the model's config may, as Qwen's does of `bos`."""
    found = {}
    for name in ("bos", "eos", "unk", "pad"):
        index = getattr(tokenizer, f"{name}_token_id", None)
        index = getattr(config, f"{name}_token_id", None) if index is None else index
        if isinstance(index, int) and 0 <= index < int(config.vocab_size):
            found[name] = index
    return found


def _added_around(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    """Return what the tokenizer puts around a text.

    Raises:
        ConfigError: it puts other tokens there than BOS before and EOS behind.
    """
    bare: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer("a")["input_ids"]
    adds = {
        "bos": tokenizer.bos_token_id is not None and whole[:1] == [tokenizer.bos_token_id] != bare[:1],
        "eos": tokenizer.eos_token_id is not None and whole[-1:] == [tokenizer.eos_token_id] != bare[-1:],
    }
    expected = [tokenizer.bos_token_id][: adds["bos"]] + bare + [tokenizer.eos_token_id][: adds["eos"]]
    if whole != expected:
        raise _refusal(f"it puts other tokens around a text than BOS and EOS ({whole} for 'a', which is {bare})")
    return adds


def _templates(template: Any) -> str | list[dict[str, str]] | None:
    """Return a chat template, or several with names, in GGUF's form."""
    if isinstance(template, dict):
        return [{"name": name, "template": text} for name, text in template.items()]
    return template or None


def _listed(part: Any, name: str) -> list[dict[str, Any]]:
    """Return the parts of a normalizer or pre-tokenizer, of which `Sequence` has several."""
    if not part:
        return []
    return list(part[name]) if part["type"] == "Sequence" else [part]


def _tokens(spec: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Return text and type of each id; ids without a token are UNUSED."""
    tokens, types = [f"[PAD{index}]" for index in range(size)], [UNUSED] * size
    for text, index in spec["model"]["vocab"].items():
        if index < size:
            tokens[index], types[index] = text, NORMAL
    for added in _added(spec, size):
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    return tokens, types


def _added(spec: Mapping[str, Any], size: int) -> list[dict[str, Any]]:
    """Return the added tokens that the model's embedding has: Gemma 3's tokenizer has one more, for images."""
    return [token for token in spec["added_tokens"] if token["id"] < size]


def _notes(spec: Mapping[str, Any], size: int) -> list[str]:
    notes = []
    beyond = [token["content"] for token in spec["added_tokens"] if token["id"] >= size]
    if beyond:
        notes.append(f"{len(beyond)} added tokens, first {beyond[0]}, are beyond the model's embedding and left out.")
    taking = [token["content"] for token in _added(spec, size) if token["lstrip"] or token["rstrip"]]
    if taking:
        notes.append(
            f"{len(taking)} added tokens, first {taking[0]}, take the blanks beside them; not so in llama.cpp."
        )
    return notes


# ---- byte-level BPE -----------------------------------------------------------------------------------------


def _byte_level(spec: Mapping[str, Any], size: int, common: dict[str, Any]) -> Vocabulary:
    model = spec["model"]
    regex = _regex(spec)
    takes_whole = bool(model.get("ignore_merges"))
    pre = PRE_TOKENIZERS.get((regex, takes_whole))
    if pre is None:
        raise _refusal(f"its pre-tokenizer splits by {regex!r} with ignore_merges={str(takes_whole).lower()}")
    notes = _notes(spec, size)
    normalizers = [part["type"] for part in _listed(spec["normalizer"], "normalizers")]
    if normalizers not in ([], ["NFC"]):
        raise _refusal(f"its normalizer is {json.dumps(spec['normalizer'])}")
    if normalizers:
        notes.append("Text is normalised to NFC by the tokenizer and not by llama.cpp: give llama.cpp NFC text.")
    if pre in APPROXIMATE:
        notes.append(f"llama.cpp's pre-tokenizer {pre} tells capitals from small letters in ASCII alone.")
    tokens, types = _tokens(spec, size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return Vocabulary("gpt2", pre, tokens, types, merges=merges, notes=tuple(notes), **common)


def _regex(spec: Mapping[str, Any]) -> str:
    """Return the regular expression by which text is split, or `DIGITS`.

    Raises:
        ConfigError: the pre-tokenizer is of another kind.
    """
    parts = _listed(spec["pre_tokenizer"], "pretokenizers")
    kinds = [part["type"] for part in parts]
    if kinds[-1:] == ["ByteLevel"] and not parts[-1]["add_prefix_space"]:
        has_regex = parts[-1].get("use_regex", True)
        if kinds == ["ByteLevel"] and has_regex:
            return GPT2
        if kinds == ["Digits", "ByteLevel"] and has_regex and parts[0]["individual_digits"]:
            return DIGITS
        if kinds == ["Split", "ByteLevel"] and not has_regex:
            split = parts[0]
            if split["behavior"] == "Isolated" and not split["invert"] and "Regex" in split["pattern"]:
                return str(split["pattern"]["Regex"])
    raise _refusal(f"its pre-tokenizer is {json.dumps(spec['pre_tokenizer'])}")


# ---- BPE with byte fallback ---------------------------------------------------------------------------------


def _sentencepiece(spec: Mapping[str, Any], size: int, common: dict[str, Any]) -> Vocabulary:
    model = spec["model"]
    vocab: dict[str, int] = model["vocab"]
    absent = [text for text in BYTES if text not in vocab]
    if absent:
        raise _refusal(f"it falls back to bytes and has no token {absent[0]}")
    notes = _notes(spec, size)
    prefix, doubles_blank, note = _space_prefix(spec)
    notes += [note] if note else []
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    tokens, types = _tokens(spec, size)
    for text in BYTES:
        types[vocab[text]] = BYTE
    if "unk" in common["ids"]:
        types[common["ids"]["unk"]] = UNKNOWN
    for added in _added(spec, size):
        index = added["id"]
        if types[index] == USER_DEFINED and BLANK in added["content"]:
            if added["normalized"]:
                tokens[index] = added["content"].replace(BLANK, " ")  # llama.cpp looks for it before it escapes blanks
            else:  # the tokenizer looks for it before it escapes blanks, and finds none: only merges make it
                types[index] = NORMAL
    merged = [text for text, kind in zip(tokens, types, strict=True) if kind == NORMAL]
    notes += _differences(merged, vocab=vocab, pairs=pairs)
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(pairs):
        ranks.setdefault("".join(pair), rank)
    scores = [-float(ranks.get(text, len(pairs))) for text in tokens]
    return Vocabulary(
        "llama",
        "default",
        tokens,
        types,
        scores=scores,
        add_space_prefix=prefix,
        doubles_blank=doubles_blank,
        notes=tuple(notes),
        **common,
    )


def _space_prefix(spec: Mapping[str, Any]) -> tuple[bool, bool, str]:
    """Return whether a blank is put before a text, whether llama.cpp doubles one, and a sentence on that.

    Raises:
        ConfigError: text is changed or split in another way.
    """
    normalizers = _listed(spec["normalizer"], "normalizers")
    parts = _listed(spec["pre_tokenizer"], "pretokenizers")
    escape = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
    whole_split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    if normalizers == [{"type": "Prepend", "prepend": BLANK}, escape] and not parts:
        return True, False, ""
    if normalizers == [escape] and parts in ([], [whole_split]):  # that split finds no blank any more
        return False, False, ""
    if not normalizers and [part["type"] for part in parts] == ["Metaspace"]:
        space = parts[0]
        if space["replacement"] == BLANK and not space.get("split", True):
            if space["prepend_scheme"] == "never":
                return False, False, ""
            note = "A text that begins with a blank is split alike if llama.cpp gets it without that one blank"
            if space["prepend_scheme"] == "first":
                note += "; after a control token in a text llama.cpp puts a blank, and the tokenizer does not"
            return True, True, f"{note}."
    found = json.dumps({"normalizer": spec["normalizer"], "pre_tokenizer": spec["pre_tokenizer"]}, ensure_ascii=False)
    raise _refusal(f"it prepares text by {found}")


def _differences(merged: list[str], *, vocab: Mapping[str, int], pairs: list[tuple[str, ...]]) -> list[str]:
    """Return where llama.cpp's algorithm may merge in another way.

    It merges any two neighbours that make a token, the one with the best score first. That is the same as merges by
    rank if each pair of tokens that makes a token is a merge, and the merges that make one token follow one another.

    Args:
        merged: tokens that merges make.
    """
    known, loose = set(pairs), 0
    for text in merged:
        splits = ((text[:place], text[place:]) for place in range(1, len(text)))
        loose += sum(1 for pair in splits if pair[0] in vocab and pair[1] in vocab and pair not in known)
    products = ["".join(pair) for pair in pairs]
    runs = 1 + sum(1 for one, other in pairwise(products) if one != other)
    scattered = runs - len(set(products)) if products else 0
    if not loose and not scattered:
        return []
    return [
        f"llama.cpp also joins {loose} pairs of tokens that are no merges of this tokenizer, and takes the {scattered} "
        "merges that come later than another of the same token with that one: rare text may be split otherwise."
    ]
