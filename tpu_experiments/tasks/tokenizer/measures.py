"""Measures of a tokenizer on held-out text; tpu_experiments/data/tokens/README.md defines each."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from tpu_experiments.pages.table import aligned

HARD_LINES = (
    "ș ț 日本 🚀",
    "Ştiinţă şi ştiință: ş ţ ș ț",
    "cafe\u0301 și café, ﬁ și fi",
    "for i in range(10):  x[i] += 0x1F  # TODO\u00b2",
    '    if (a != b) {\treturn "<0x41>";\t}',
    "3.14159 1.234.567,89 2024-11-24 123456789",
    "  două   blancuri, și la sfârșit  ",
    "prima linie\n\na doua\r\n\ta treia",
    "مرحبا हिन्दी ไทย Ελληνικά русский 한국어",
    "👩‍👩‍👧 \u00a0\u200b\u2009 \ufffd",
)
"""Lines that tokenizers break on: comma and cedilla, composed and not, code, numbers, blanks, other scripts, joined
emoji, blanks of no width."""
LONGEST = 12
BATCH = 256


@dataclass
class HardLine:
    """One of `HARD_LINES`."""

    line: str
    tokens: int
    unknown: int
    is_exact: bool


@dataclass
class Measures:
    """Counts of one tokenizer on the held-out texts, and what follows from them."""

    name: str
    entries: int
    """Entries of the vocabulary, special and reserved ones among them."""
    texts: int = 0
    words: int = 0
    """Runs of characters that are not blanks."""
    bytes: int = 0
    tokens: int = 0
    unknown: int = 0
    lines: int = 0
    """Lines that are not blank."""
    exact_lines: int = 0
    used: int = 0
    """Different entries that occur."""
    longest: list[str] = field(default_factory=list)
    """The longest tokens of the vocabulary, as text."""
    hard: list[HardLine] = field(default_factory=list)

    @property
    def tokens_per_word(self) -> float:
        """Return the fertility."""
        return self.tokens / max(self.words, 1)

    @property
    def bytes_per_token(self) -> float:
        """Return the compression."""
        return self.bytes / max(self.tokens, 1)

    @property
    def unknown_rate(self) -> float:
        """Return the share of tokens that are unknown."""
        return self.unknown / max(self.tokens, 1)

    @property
    def exact_rate(self) -> float:
        """Return the share of lines that decoding restores letter for letter."""
        return self.exact_lines / max(self.lines, 1)

    @property
    def unused_rate(self) -> float:
        """Return the share of entries that the held-out texts do not have."""
        return 1 - self.used / self.entries

    def fields(self) -> dict[str, Any]:
        """Return the counts and what follows from them, for measures.json."""
        rates = ("tokens_per_word", "bytes_per_token", "unknown_rate", "exact_rate", "unused_rate")
        return asdict(self) | {name: getattr(self, name) for name in rates}

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Measures":
        """Return the measures that `fields` returned."""
        known = {name: value for name, value in fields.items() if name in cls.__dataclass_fields__}
        return cls(**known | {"hard": [HardLine(**line) for line in fields["hard"]]})


def measured(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], *, name: str) -> Measures:
    """Measure a tokenizer on texts, without special tokens around them."""
    found = Measures(name=name, entries=len(tokenizer), longest=longest_tokens(tokenizer))
    occurring: set[int] = set()
    stream = iter(texts)
    while batch := list(islice(stream, BATCH)):
        found.texts += len(batch)
        found.words += sum(len(text.split()) for text in batch)
        found.bytes += sum(len(text.encode()) for text in batch)
        for ids in encoded(tokenizer, batch):
            found.tokens += len(ids)
            found.unknown += _unknown(tokenizer, ids)
            occurring.update(ids)
        lines = [line for text in batch for line in text.split("\n") if line.strip()]
        found.lines += len(lines)
        found.exact_lines += sum(line == text for line, text in zip(lines, _restored(tokenizer, lines), strict=True))
    found.used = len(occurring)
    restored = _restored(tokenizer, HARD_LINES)
    for line, ids, text in zip(HARD_LINES, encoded(tokenizer, HARD_LINES), restored, strict=True):
        found.hard.append(HardLine(line, len(ids), _unknown(tokenizer, ids), text == line))
    return found


def encoded(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of each text, without special tokens around it."""
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def longest_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the longest tokens as text, the longest first, special ones left out."""
    added = tokenizer.added_tokens_decoder
    ids = [number for number in tokenizer.get_vocab().values() if number not in added]
    texts = [tokenizer.convert_tokens_to_string([tokenizer.convert_ids_to_tokens(number)]) for number in ids]
    return sorted(texts, key=lambda text: (-len(text), text))[:LONGEST]


def _restored(tokenizer: PreTrainedTokenizerBase, lines: Sequence[str]) -> list[str]:
    ids = encoded(tokenizer, lines) if lines else []
    texts: list[str] = [tokenizer.decode(each, clean_up_tokenization_spaces=False) for each in ids]
    return texts


def _unknown(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> int:
    number = tokenizer.unk_token_id
    return 0 if number is None else Counter(ids)[number]


COLUMNS = ("tokenizer", "entries", "tokens/word", "bytes/token", "unknown", "exact lines", "unused")


def row_of(found: Measures) -> tuple[str, ...]:
    """Return the cells of `COLUMNS`."""
    return (
        found.name,
        f"{found.entries:,}",
        f"{found.tokens_per_word:.4f}",
        f"{found.bytes_per_token:.4f}",
        f"{found.unknown_rate:.4%}",
        f"{found.exact_lines:,}/{found.lines:,}",
        f"{found.unused_rate:.1%}",
    )


def as_table(found: Sequence[Measures]) -> str:
    """Return the table that the command prints."""
    return aligned([COLUMNS, *map(row_of, found)])
