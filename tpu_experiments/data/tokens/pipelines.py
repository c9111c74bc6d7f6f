"""How a tokenizer divides a text into words, where what it makes of a text is what it makes of its words in turn."""

import re
import unicodedata
from dataclasses import dataclass
from itertools import groupby
from typing import Any

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""That of tokenizers' ByteLevel."""
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace("{1,3}", "")
BLANK, _BLANK_WORDS = "\u2581", re.compile(" *[^ ]+| +")
LETTER = "x"
"""After which a word with blanks is like any other: only the first may get another blank."""
_SPACES = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""Unicode's White_Space. Python's own class has U+001C to U+001F too."""


@dataclass(frozen=True)
class Pipeline:
    """How a tokenizer divides a text into words."""

    words: re.Pattern[str]
    has_blanks: bool
    """Blanks become U+2581, and a word begins with them."""
    is_nfc: bool = False


def pipeline_of(state: dict[str, Any]) -> Pipeline | None:
    """The pipeline of a tokenizer by its tokenizer.json; None when its ids are not certain to be those of its words."""
    return (_byte_level(state) or _with_blanks(state)) if _is_plain(state) else None


def _is_plain(state: dict[str, Any]) -> bool:
    """Whether it is a BPE that makes the same of a word every time, with added tokens that are only their strings."""
    model, added = state["model"], state["added_tokens"]
    if model["type"] != "BPE" or any(map(model.get, ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))):
        return False
    if any(token[key] for token in added for key in ("normalized", "lstrip", "rstrip", "single_word")):
        return False
    after = state["post_processor"] or {"processors": []}
    only_trims = all(step["type"] in ("ByteLevel", "TemplateProcessing") for step in after.get("processors", [after]))
    return bool(added) and all(token["content"] for token in added) and only_trims


def _byte_level(state: dict[str, Any]) -> Pipeline | None:
    """The pipeline of a byte-level BPE; None for another."""
    words, is_nfc = state["pre_tokenizer"], (state["normalizer"] or {}).get("type") == "NFC"
    if (state["normalizer"] and not is_nfc) or words is None:
        return None
    steps = words["pretokenizers"] if words["type"] == "Sequence" else [words]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": len(steps) == 1}
    if len(steps) not in (1, 2) or not steps[-1].items() >= byte_level.items():
        return None
    isolated = {"type": "Split", "behavior": "Isolated", "invert": False}
    is_split = len(steps) == 2 and steps[0].items() >= isolated.items()
    pattern = steps[0]["pattern"].get("Regex") if is_split else _GPT2_WORDS if len(steps) == 1 else None
    if pattern not in (_GPT2_WORDS, _LLAMA3_WORDS, _QWEN2_WORDS):
        return None
    return Pipeline(_python_pattern(pattern), has_blanks=False, is_nfc=is_nfc)


def _with_blanks(state: dict[str, Any]) -> Pipeline | None:
    """The pipeline of a BPE of SentencePiece; None for another, or when a token goes on after a blank."""
    model, vocab = state["model"], state["model"]["vocab"]
    # Without all bytes, unknown neighbours may become one token.
    if not model["byte_fallback"] or any(f"<0x{byte:02X}>" not in vocab for byte in range(256)):
        return None
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
    prepended = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": BLANK}, replaced]}
    unused = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    if state["normalizer"] not in (replaced, prepended) or state["pre_tokenizer"] not in (None, unused):
        return None
    if any(token["content"].startswith(LETTER) for token in state["added_tokens"]) or model["ignore_merges"]:
        return None
    if BLANK not in vocab or any(BLANK in token.lstrip(BLANK) for token in vocab):
        return None
    return Pipeline(_BLANK_WORDS, has_blanks=True)


def _python_pattern(pattern: str) -> re.Pattern[str]:
    r"""With \p{L}, \p{N} and white space spelled out up to U+FFFF: `re` looks those up in one step."""
    classes = {r"\p{L}": _characters_of("L"), r"\p{N}": _characters_of("N"), r"\s": _SPACES}
    groups = {r"\S": f"[^{_SPACES}]"} | {name: f"[{characters}]" for name, characters in classes.items()}

    def spelled_out(match: re.Match[str]) -> str:
        if match[0] in groups:
            return groups[match[0]]
        return re.sub(r"\\p\{.\}|\\s", lambda name: classes[name[0]], match[0])

    return re.compile(re.sub(r"\[[^]]*\]|\\p\{.\}|\\[sS]", spelled_out, pattern))


def _characters_of(category: str) -> str:
    """The characters up to U+FFFF of one of Unicode's main categories, as the ranges of a class."""
    of_it = [code for code in range(2**16) if unicodedata.category(chr(code))[0] == category]
    runs = [list(run) for _, run in groupby(enumerate(of_it), key=lambda pair: pair[1] - pair[0])]
    return "".join(f"\\u{run[0][1]:04x}-\\u{run[-1][1]:04x}" for run in runs)
