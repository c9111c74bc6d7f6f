"""Memoised tokenisation word by word: the ids of the tokenizer, at more than twice its speed.

A BPE merges nothing across the borders of its pre-tokenizer's words, so the ids of a text are those of its words,
concatenated. Implemented for the pipelines of GPT-2, Llama 3, Qwen 2 and 3 (byte-level), and of Mistral and Gemma
(blanks as U+2581). Words are found with Python's `re`. The first time a character occurs it is verified that `re` and
the tokenizer classify it alike; texts with a character that they do not are left to the tokenizer.

`Pipeline` describes how a tokenizer divides a text into words, where its ids are known to be those of the words.
"""

import json
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from tpu_experiments.storage.gguf.splits import BLANK, GPT2, LLAMA3, QWEN2

WORDS_OF_DIGITS = {"any": GPT2, "three": LLAMA3, "single": QWEN2}
"""Patterns of byte-level BPE by the largest number of digits in a word: GPT-2's, Llama 3's and Qwen 2's."""
_BLANK_WORDS = re.compile(" *[^ ]+| +")
LETTER = "x"
"""Text before a word when it is encoded: only the first word of a text may get a prepended blank."""
_SPACES = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""Unicode's White_Space. Python's own class has U+001C to U+001F too."""


@dataclass(frozen=True)
class Pipeline:
    """Division of a text into words by a tokenizer."""

    words: re.Pattern[str]
    has_blanks: bool
    """Whether blanks become U+2581 and lead their word."""
    is_nfc: bool = False


def pipeline_of(state: dict[str, Any]) -> Pipeline | None:
    """Return a tokenizer's pipeline by its tokenizer.json; None unless its ids are surely word by word."""
    return (_byte_level(state) or _with_blanks(state)) if _is_plain(state) else None


def _is_plain(state: dict[str, Any]) -> bool:
    """Return whether it is a deterministic BPE whose added tokens match their strings only."""
    model, added = state["model"], state["added_tokens"]
    if model["type"] != "BPE" or any(map(model.get, ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))):
        return False
    if any(token[key] for token in added for key in ("normalized", "lstrip", "rstrip", "single_word")):
        return False
    after = state["post_processor"] or {"processors": []}
    only_trims = all(step["type"] in ("ByteLevel", "TemplateProcessing") for step in after.get("processors", [after]))
    return bool(added) and all(token["content"] for token in added) and only_trims


def _byte_level(state: dict[str, Any]) -> Pipeline | None:
    """Return the pipeline of a byte-level BPE; None for another tokenizer."""
    words, is_nfc = state["pre_tokenizer"], (state["normalizer"] or {}).get("type") == "NFC"
    if (state["normalizer"] and not is_nfc) or words is None:
        return None
    steps = words["pretokenizers"] if words["type"] == "Sequence" else [words]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": len(steps) == 1}
    if len(steps) not in (1, 2) or not steps[-1].items() >= byte_level.items():
        return None
    isolated = {"type": "Split", "behavior": "Isolated", "invert": False}
    is_split = len(steps) == 2 and steps[0].items() >= isolated.items()
    pattern = steps[0]["pattern"].get("Regex") if is_split else GPT2 if len(steps) == 1 else None
    if pattern not in (GPT2, LLAMA3, QWEN2):
        return None
    return Pipeline(_python_pattern(pattern), has_blanks=False, is_nfc=is_nfc)


def _with_blanks(state: dict[str, Any]) -> Pipeline | None:
    """Return the pipeline of a SentencePiece BPE; None for another, or if a token has an inner blank."""
    model, vocab = state["model"], state["model"]["vocab"]
    # Without all byte tokens, neighbouring unknown characters may become one token.
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
    r"""Compile with \p{L}, \p{N} and white space expanded up to U+FFFF, which `re` looks up in one step."""
    classes = {r"\p{L}": _characters_of("L"), r"\p{N}": _characters_of("N"), r"\s": _SPACES}
    groups = {r"\S": f"[^{_SPACES}]"} | {name: f"[{characters}]" for name, characters in classes.items()}

    def spelled_out(match: re.Match[str]) -> str:
        if match[0] in groups:
            return groups[match[0]]
        return re.sub(r"\\p\{.\}|\\s", lambda name: classes[name[0]], match[0])

    return re.compile(re.sub(r"\[[^]]*\]|\\p\{.\}|\\[sS]", spelled_out, pattern))


def _characters_of(category: str) -> str:
    """Return the characters up to U+FFFF of one of Unicode's main categories, as ranges of a class."""
    of_it = [code for code in range(2**16) if unicodedata.category(chr(code))[0] == category]
    runs = [list(run) for _, run in groupby(enumerate(of_it), key=lambda pair: pair[1] - pair[0])]
    return "".join(f"\\u{run[0][1]:04x}-\\u{run[-1][1]:04x}" for run in runs)


_MAX_WORDS, _MAX_CHARACTERS = 2**18, 64
"""Words in the memo, some 200 bytes each; and the length of the longest, since longer ones seldom recur."""
_MAX_ADDED = 100
"""Characters of an added token: a pattern nests a group for each, and `re` is limited to 1,000 nested calls."""
_CONTEXT = "a{0}a1{0}1!{0}! {0}  {0}\n{0}\n{0}{0}{0} '{0}x '{0}e '{0}l 'r{0} 'v{0} 'l{0}"
"""A text whose words distinguish letters, numbers, white space and the rest, and whatever `(?i:'s)` takes for an s."""
_MARKS = "{0} a\u0345{0} {0}\u0334"
"""A text in which canonical order moves a combining mark: the classes of U+0345 and U+0334 are 240 and 1."""
_CHECKED = (
    "Ștefan  n-are\t1234,5 lei;\r\n\n   it's WE'LL\xa0'S... \u200b\x1c\x85 !?\n x=[1] ¿漢字 한국 مرحبا हिन्दी ไทย é½²Ⅷ ",
    "  \n a\u0301 ſ'ſ 🚀👩‍👩 \u2581\u2581x 𝐀𐐷\U00011930 \ufffd\n\n",
)


def words_of(tokenizer: PreTrainedTokenizerBase) -> "WordMemo | None":
    """Return a memo of this tokenizer's words; None unless its ids are surely those of its words."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    pipeline = pipeline_of(state)
    if pipeline is None:
        return None
    added = [token["content"] for token in state["added_tokens"]]
    if max(map(len, added), default=0) > _MAX_ADDED:
        return None
    memo = WordMemo(tokenizer, pipeline=pipeline, added=added)
    checked = [text + "".join(added[:9]) + text for text in _CHECKED]
    return memo if memo.encode(checked[0]) and all(_is_right(memo, text, tokenizer) for text in checked) else None


def backend_of(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return the Rust tokenizer, in the state in which transformers sets it for a call without options."""
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    return backend


class WordEncoding:
    """Tokens of one text, with the interface of tokenizers' Encoding."""

    def __init__(self, words: list[str], encoded: list[bytes], *, firsts: "dict[int, _Words]", other: "_Words") -> None:
        self._words, self._encoded = words, encoded
        self._firsts, self._other = firsts, other
        self.ids: NDArray[np.int32] = np.frombuffer(b"".join(encoded), np.int32)
        """(L,); read only."""

    def __len__(self) -> int:
        return len(self.ids)

    def char_to_token(self, character: int) -> int | None:
        """Return the first token that contains this character of the text."""
        word = bisect_right(self._characters, character) - 1
        position = character - self._characters[word]
        for i, (begin, end) in enumerate(self._offsets(word)):
            if begin <= position < end:
                return self._bytes[word] // 4 + i
        return None

    def token_to_chars(self, token: int) -> tuple[int, int]:
        """Return (begin, end) of a token in the text."""
        word = bisect_right(self._bytes, token * 4) - 1
        begin, end = self._offsets(word)[token - self._bytes[word] // 4]
        return self._characters[word] + begin, self._characters[word] + end

    def _offsets(self, word: int) -> tuple[tuple[int, int], ...]:
        return self._firsts.get(word, self._other).offsets(self._words[word])

    @cached_property
    def _characters(self) -> list[int]:
        """Start of each word in the text, in characters."""
        return list(accumulate(map(len, self._words), initial=0))

    @cached_property
    def _bytes(self) -> list[int]:
        """Start of each word's ids, in bytes (4 per id)."""
        return list(accumulate(map(len, self._encoded), initial=0))


class _Unfamiliar(Exception):
    """A character that the tokenizer and Python classify differently."""


class _Words(dict[str, bytes]):
    """Memo from word to ids (int32), for words in one context, represented by the text `before` them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, before: str, check: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._before = before
        self._num_before = len(self._encode("").ids)
        self._check = check
        self._offsets: dict[str, tuple[tuple[int, int], ...]] = {}

    def __missing__(self, word: str) -> bytes:
        self._check(word)
        ids = np.array(self._encode(word).ids[self._num_before :], np.int32).tobytes()
        _memoise(self, word, ids)
        return ids

    def learn(self, words: Iterable[str]) -> None:
        """Add the new words in one call of the tokenizer: half the time of a call for each.

        Only valid where `before` is an added token, across which nothing is merged.
        """
        new = [word for word in set(words) if word not in self and len(word) <= _MAX_CHARACTERS]
        if len(new) < 2:
            return
        for word in new:
            self._check(word)
        # Without offsets: a fifth less time.
        joined = [self._before + self._before.join(new)]
        [encoding] = backend_of(self._tokenizer).encode_batch_fast(joined, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        bounds = [*np.flatnonzero(ids == ids[0]).tolist(), len(ids)]
        if len(bounds) == len(new) + 1:  # else the end of a word and the next added token formed another added token
            for word, begin, end in zip(new, bounds, bounds[1:], strict=False):
                _memoise(self, word, ids[begin + 1 : end].tobytes())

    def offsets(self, word: str) -> tuple[tuple[int, int], ...]:
        """Return (begin, end) of a word's tokens, in characters of the word."""
        if (offsets := self._offsets.get(word)) is None:
            shift, of_all = len(self._before), self._encode(word).offsets
            offsets = tuple((begin - shift, end - shift) for begin, end in of_all[self._num_before :])
            _memoise(self._offsets, word, offsets)
        return offsets

    def _encode(self, word: str) -> Encoding:
        return backend_of(self._tokenizer).encode(self._before + word, add_special_tokens=False)


def _nones(values: list[bytes | None]) -> list[int]:
    return [n for n, value in enumerate(values) if value is None] if None in values else []


def _memoise(memo: dict[str, Any], word: str, value: object) -> None:
    if len(memo) >= _MAX_WORDS:
        memo.clear()
    if len(word) <= _MAX_CHARACTERS:
        memo[word] = value


class WordMemo:
    """Encoder of texts, word by word."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, pipeline: Pipeline, added: list[str]) -> None:
        self._tokenizer = tokenizer
        self._pipeline = pipeline
        self._added = re.compile(f"({_any_of(added)})")
        self._familiar: set[str] = set()
        # The longest added token is part of no other, whatever follows it.
        longest = max(added, key=len)
        places = ("", longest, LETTER if pipeline.has_blanks else longest)
        self._first, self._first_of_part, self._other = (
            _Words(tokenizer, before=before, check=self._check) for before in places
        )
        self._last: dict[tuple[str, bool], tuple[list[str], list[bytes]]] = {}
        """Words and ids of the last text's parts; whether one is the first matters. Pairs have a prompt twice."""

    def encode(self, text: str) -> WordEncoding | None:
        """Return the tokens of a text without special tokens around it; None if the tokenizer must encode it."""
        if self._pipeline.is_nfc and not unicodedata.is_normalized("NFC", text):
            return None
        words: list[str] = []
        encoded: list[bytes] = []
        firsts: dict[int, _Words] = {}
        find = self._pipeline.words.findall
        # The split alternates between texts and added tokens.
        parts = [(part, i % 2 == 1) for i, part in enumerate(self._added.split(text)) if part]
        keys = [(part, number == 0) for number, (part, _) in enumerate(parts)]
        last, self._last = self._last, {}
        new: dict[tuple[str, bool], tuple[list[str], list[bytes | None]]] = {}
        for key, (part, is_added) in zip(keys, parts, strict=True):
            if key not in last:
                found = [part] if is_added else find(part)
                new[key] = found, [b"", *map(self._other.get, found[1:])]
        try:
            unknown = {key: _nones(ids) for key, (_, ids) in new.items()}
            if not self._pipeline.has_blanks:
                self._other.learn(found[n] for key, (found, _) in new.items() for n in unknown[key])
            for key in keys:
                first = firsts[len(words)] = self._first_of_part if words else self._first
                if key not in last:
                    found, known = new[key]
                    known[0] = first[found[0]]
                    for n in unknown[key]:
                        known[n] = self._other[found[n]]
                    last[key] = found, cast("list[bytes]", known)
                found, ids = self._last[key] = last[key]
                encoded += ids
                words += found
        except _Unfamiliar:
            return None
        return WordEncoding(words, encoded, firsts=firsts, other=self._other)

    def _check(self, word: str) -> None:
        for character in set(word) - self._familiar:
            if not self._is_familiar(character):
                raise _Unfamiliar
            self._familiar.add(character)

    def _is_familiar(self, character: str) -> bool:
        """Return whether the tokenizer classifies a character as `re` and unicodedata do."""
        backend = backend_of(self._tokenizer)
        if self._pipeline.has_blanks:
            return character != BLANK
        if self._pipeline.is_nfc:
            text = _MARKS.format(character)
            is_alike = backend.normalizer.normalize_str(text) == unicodedata.normalize("NFC", text)
            if unicodedata.category(character) == "Cn" or not is_alike:
                return False
        text = _CONTEXT.format(character)
        pieces = [text[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
        return pieces == self._pipeline.words.findall(text)


def _any_of(strings: list[str]) -> str:
    """Return a pattern that matches the longest of the strings, and reads each character once."""
    if strings == [""]:
        return ""
    nexts: dict[str, list[str]] = {}
    for string in filter(None, strings):
        nexts.setdefault(string[0], []).append(string[1:])
    branches = "|".join(re.escape(first) + _any_of(rests) for first, rests in nexts.items())
    return f"(?:{branches})" + "?" * ("" in strings)


def _is_right(memo: WordMemo, text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the memo's ids and offsets equal the tokenizer's; True where it has none."""
    mine, expected = memo.encode(text), backend_of(tokenizer).encode(text, add_special_tokens=False)
    if mine is None or mine.ids.tolist() != expected.ids:
        return mine is None
    tokens = all(mine.char_to_token(i) == expected.char_to_token(i) for i in range(len(text)))
    return tokens and all(mine.token_to_chars(i) == expected.token_to_chars(i) for i in range(len(mine)))
