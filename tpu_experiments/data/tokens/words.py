"""The ids of words, remembered: what the tokenizer would say, at more than twice its speed.

A BPE merges nothing across the borders of its pre-tokenizer's words, so the ids of a text are those of
its words in turn. Done for the pipelines of GPT-2, Llama 3, Qwen 2 and 3 (byte-level), and of Mistral
and Gemma (blanks as U+2581). Words are found with Python's `re`; how the tokenizer reads a character is
looked at when it is first met, and texts with one that it reads differently are left to the tokenizer.
"""

import json
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from tpu_experiments.data.tokens.pipelines import BLANK, LETTER, Pipeline, pipeline_of

_MAX_WORDS, _MAX_CHARACTERS = 2**18, 64
"""Remembered, some 200 bytes each; and the longest of them, since longer ones seldom come back."""
_MAX_ADDED = 100
"""Characters of an added token: a pattern has a group for each, one inside the other, and `re` 1,000 calls."""
_CONTEXT = "a{0}a1{0}1!{0}! {0}  {0}\n{0}\n{0}{0}{0} '{0}x '{0}e '{0}l 'r{0} 'v{0} 'l{0}"
"""A text whose words tell letters, numbers, white space and the rest apart, and what `(?i:'s)` takes for an s."""
_MARKS = "{0} a\u0345{0} {0}\u0334"
"""A text in which canonical order moves a combining mark: the classes of U+0345 and U+0334 are 240 and 1."""
_CHECKED = (
    "Ștefan  n-are\t1234,5 lei;\r\n\n   it's WE'LL\xa0'S... \u200b\x1c\x85 !?\n x=[1] ¿漢字 한국 مرحبا हिन्दी ไทย é½²Ⅷ ",
    "  \n a\u0301 ſ'ſ 🚀👩‍👩 \u2581\u2581x 𝐀𐐷\U00011930 \ufffd\n\n",
)


def words_of(tokenizer: PreTrainedTokenizerBase) -> "WordMemo | None":
    """A memo of the words of this tokenizer; None when its ids are not certain to be those of its words."""
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
    """The Rust tokenizer, as transformers sets it for a call without options."""
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    return backend


class WordEncoding:
    """The tokens of one text; its methods are those of tokenizers' Encoding."""

    def __init__(self, words: list[str], encoded: list[bytes], *, firsts: "dict[int, _Words]", other: "_Words") -> None:
        self._words, self._encoded = words, encoded
        self._firsts, self._other = firsts, other
        self.ids: NDArray[np.int32] = np.frombuffer(b"".join(encoded), np.int32)
        """(L,); read only."""

    def __len__(self) -> int:
        return len(self.ids)

    def char_to_token(self, character: int) -> int | None:
        """The first token with this character of the text."""
        word = bisect_right(self._characters, character) - 1
        position = character - self._characters[word]
        for i, (begin, end) in enumerate(self._offsets(word)):
            if begin <= position < end:
                return self._bytes[word] // 4 + i
        return None

    def token_to_chars(self, token: int) -> tuple[int, int]:
        """(begin, end) of a token in the text."""
        word = bisect_right(self._bytes, token * 4) - 1
        begin, end = self._offsets(word)[token - self._bytes[word] // 4]
        return self._characters[word] + begin, self._characters[word] + end

    def _offsets(self, word: int) -> tuple[tuple[int, int], ...]:
        return self._firsts.get(word, self._other).offsets(self._words[word])

    @cached_property
    def _characters(self) -> list[int]:
        """Where each word begins."""
        return list(accumulate(map(len, self._words), initial=0))

    @cached_property
    def _bytes(self) -> list[int]:
        """Where the ids of each word begin, 4 bytes each."""
        return list(accumulate(map(len, self._encoded), initial=0))


class _Unfamiliar(Exception):
    """A character that the tokenizer does not read as Python does."""


class _Words(dict[str, bytes]):
    """The ids (int32) of words at one kind of place, which the text before it stands for."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, before: str, check: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._before = before
        self._num_before = len(self._encode("").ids)
        self._check = check
        self._offsets: dict[str, tuple[tuple[int, int], ...]] = {}

    def __missing__(self, word: str) -> bytes:
        self._check(word)
        ids = np.array(self._encode(word).ids[self._num_before :], np.int32).tobytes()
        _keep(self, word, ids)
        return ids

    def learn(self, words: Iterable[str]) -> None:
        """Remember those that are new, in one call of the tokenizer: half the time of a call for each.

        Only where `before` is an added token, which nothing is merged across.
        """
        new = [word for word in set(words) if word not in self and len(word) <= _MAX_CHARACTERS]
        if len(new) < 2:
            return
        for word in new:
            self._check(word)
        ids = np.array(self._encode(self._before.join(new)).ids, np.int32)
        bounds = [*np.flatnonzero(ids == ids[0]).tolist(), len(ids)]
        if len(bounds) == len(new) + 1:  # else the end of a word and the added token after it began another one
            for word, begin, end in zip(new, bounds, bounds[1:], strict=False):
                _keep(self, word, ids[begin + 1 : end].tobytes())

    def offsets(self, word: str) -> tuple[tuple[int, int], ...]:
        """(begin, end) of its tokens, in characters of the word."""
        if (offsets := self._offsets.get(word)) is None:
            shift, of_all = len(self._before), self._encode(word).offsets
            offsets = tuple((begin - shift, end - shift) for begin, end in of_all[self._num_before :])
            _keep(self._offsets, word, offsets)
        return offsets

    def _encode(self, word: str) -> Encoding:
        return backend_of(self._tokenizer).encode(self._before + word, add_special_tokens=False)


def _keep(memo: dict[str, Any], word: str, value: object) -> None:
    if len(memo) >= _MAX_WORDS:
        memo.clear()
    if len(word) <= _MAX_CHARACTERS:
        memo[word] = value


class WordMemo:
    """Encodes texts word by word."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, pipeline: Pipeline, added: list[str]) -> None:
        self._tokenizer = tokenizer
        self._pipeline = pipeline
        self._added = re.compile(f"({_any_of(added)})")
        self._familiar: set[str] = set()
        # The longest is part of no other, whatever follows it.
        longest = max(added, key=len)
        places = ("", longest, LETTER if pipeline.has_blanks else longest)
        self._first, self._first_of_part, self._other = (
            _Words(tokenizer, before=before, check=self._check) for before in places
        )

    def encode(self, text: str) -> WordEncoding | None:
        """The tokens of a text without special tokens around it; None when only the tokenizer can tell."""
        if self._pipeline.is_nfc and not unicodedata.is_normalized("NFC", text):
            return None
        words: list[str] = []
        encoded: list[bytes] = []
        firsts: dict[int, _Words] = {}
        find = self._pipeline.words.findall
        try:
            # Texts and added tokens by turns.
            parts = [find(part) if i % 2 == 0 else [part] for i, part in enumerate(self._added.split(text)) if part]
            if not self._pipeline.has_blanks:
                self._other.learn(chain.from_iterable(found[1:] for found in parts))
            for found in parts:
                first = firsts[len(words)] = self._first_of_part if words else self._first
                encoded.append(first[found[0]])
                encoded += map(self._other.__getitem__, found[1:])
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
        """Whether the tokenizer reads a character as `re` and unicodedata do."""
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
    """A pattern that matches the longest of them at a place, and looks at each character once."""
    if strings == [""]:
        return ""
    nexts: dict[str, list[str]] = {}
    for string in filter(None, strings):
        nexts.setdefault(string[0], []).append(string[1:])
    branches = "|".join(re.escape(first) + _any_of(rests) for first, rests in nexts.items())
    return f"(?:{branches})" + "?" * ("" in strings)


def _is_right(memo: WordMemo, text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether ids and offsets are the tokenizer's own, where the memo gives any."""
    mine, expected = memo.encode(text), backend_of(tokenizer).encode(text, add_special_tokens=False)
    if mine is None or mine.ids.tolist() != expected.ids:
        return mine is None
    tokens = all(mine.char_to_token(i) == expected.char_to_token(i) for i in range(len(text)))
    return tokens and all(mine.token_to_chars(i) == expected.token_to_chars(i) for i in range(len(mine)))
