"""Rules for the text of documents, each optional and counted; what they mean is said in config/sources.py."""

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.sources import CleanConfig
from tpu_experiments.data.cleaning.language import check_language, language_probability
from tpu_experiments.data.documents import Document, Refused

COMMA_OF_CEDILLA = {"Ş": "Ș", "ş": "ș", "Ţ": "Ț", "ţ": "ț"}

_FORMS: dict[str, Literal["NFC", "NFKC"]] = {"nfc": "NFC", "nfkc": "NFKC"}
_BETWEEN_PARAGRAPHS = re.compile(r"\n\s*\n")
_BLANKS = re.compile(r"[^\S\n]+")  # with no-break spaces, carriage returns and tabs
_LINE_ENDS = re.compile(r" ?\n ?")
_EMPTY_LINES = re.compile(r"\n{3,}")


def check_rules(rules: CleanConfig, *, source: str, kind: str) -> None:
    """Refuse rules of the source `source` that no document of its `kind` (text or chat) could go by.

    Raises:
        ConfigError: an unknown language, limits that cross, or a scope that the kind does not have.
    """
    key = f"data.{source}.clean"
    if rules.language is not None:
        check_language(rules.language, key=f"{key}.language")
    if rules.min_chars and rules.max_chars and rules.min_chars > rules.max_chars:
        raise ConfigError(
            f"{key}.min_chars={rules.min_chars}; it is more than {key}.max_chars={rules.max_chars}, so that no text "
            "is kept; lower it."
        )
    if rules.scope == "paragraph" and kind == "chat":
        raise ConfigError(
            f"{key}.scope=paragraph; {source} gives conversations, of which no part is left out; set "
            f"{key}.scope=document."
        )
    if rules.max_paragraphs is not None and rules.scope != "paragraph":
        raise ConfigError(
            f"{key}.max_paragraphs={rules.max_paragraphs}; paragraphs are only looked at with {key}.scope=paragraph; "
            "set that too, or leave max_paragraphs out."
        )


class Broken(NamedTuple):
    """A rule that a text does not keep: `has <what>, <limit>.`"""

    reason: str
    what: str
    limit: str


class Cleaner:
    """Applies the rules of one source; picklable, made once per process.

    Cleaning what it kept changes nothing.
    """

    def __init__(self, rules: CleanConfig) -> None:
        self.rules = rules
        self.changes: Counter[str] = Counter()
        """Documents changed: `unicode`, `romanian_letters`, `whitespace`. Paragraphs left out: `paragraphs_<reason>`
        by the rule they broke, `paragraphs_over_max` those after the last one kept."""
        self._rewrites = _rewrites(rules)

    def clean(self, document: Document) -> Document | Refused:
        """The document as the rules leave it, or why it does not go on."""
        if document.is_empty:
            return Refused("empty", document.place, "has no text.", is_bad_row=False)
        if document.messages is not None:
            return self._conversation(document, messages=document.messages)
        (text,) = self._rewritten([document.text or ""])
        if self.rules.scope == "paragraph":
            return self._paragraphs(document, text=text)
        broken = self._broken(text) or self._foreign(text)
        return _refused(document, broken) if broken else _with_text(document, text)

    def _conversation(self, document: Document, *, messages: tuple[tuple[str, str], ...]) -> Document | Refused:
        texts = self._rewritten([content for _, content in messages])
        for turn, text in enumerate(texts, start=1):
            if broken := self._broken(text):
                return _refused(document, broken, where=f" in turn {turn}")
        if broken := self._foreign("\n".join(texts)):
            return _refused(document, broken)
        cleaned = tuple((role, text) for (role, _), text in zip(messages, texts, strict=True))
        return document if cleaned == messages else replace(document, messages=cleaned)

    def _paragraphs(self, document: Document, *, text: str) -> Document | Refused:
        paragraphs = [p for p in _BETWEEN_PARAGRAPHS.split(text) if p and not p.isspace()]
        kept: list[str] = []
        left_out: Counter[str] = Counter()
        for number, paragraph in enumerate(paragraphs):
            if len(kept) == self.rules.max_paragraphs:
                left_out["over_max"] = len(paragraphs) - number
                break
            if broken := self._broken(paragraph) or self._foreign(paragraph):
                left_out[broken.reason] += 1
            else:
                kept.append(paragraph)
        self.changes.update({f"paragraphs_{reason}": count for reason, count in left_out.items()})
        if not kept:
            counts = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common())
            message = f"has no paragraph left of {len(paragraphs)}: {counts}."
            return Refused("no_paragraph", document.place, message, is_bad_row=False)
        return _with_text(document, "\n\n".join(kept))

    def _rewritten(self, texts: list[str]) -> list[str]:
        """Texts of one document, rewritten."""
        for name, rewrite in self._rewrites:
            rewritten = [rewrite(text) for text in texts]
            if rewritten != texts:
                self.changes[name] += 1
            texts = rewritten
        return texts

    def _broken(self, text: str) -> Broken | None:
        """The first rule about size and signs that the text breaks."""
        rules, num_chars = self.rules, len(text)
        if rules.min_chars is not None and num_chars < rules.min_chars:
            return Broken("too_few_chars", f"{num_chars} characters", f"fewer than clean.min_chars={rules.min_chars}")
        if rules.max_chars is not None and num_chars > rules.max_chars:
            return Broken("too_many_chars", f"{num_chars} characters", f"more than clean.max_chars={rules.max_chars}")
        if rules.min_words is not None and (num_words := len(text.split())) < rules.min_words:
            return Broken("too_few_words", f"{num_words} words", f"fewer than clean.min_words={rules.min_words}")
        if rules.punctuation and not any(sign in text for sign in rules.punctuation):
            return Broken("no_punctuation", "no punctuation", f"and clean.punctuation={rules.punctuation} asks for one")
        return None

    def _foreign(self, text: str) -> Broken | None:
        """The language rule, the slowest one, so it comes last."""
        rules = self.rules
        if rules.language is None:
            return None
        probability = language_probability(text, code=rules.language)
        if probability >= rules.language_min_probability:
            return None
        limit = f"below clean.language_min_probability={rules.language_min_probability}"
        return Broken("language", f"probability {probability:.3f} of clean.language={rules.language}", limit)


def _rewrites(rules: CleanConfig) -> list[tuple[str, Callable[[str], str]]]:
    """The rules that rewrite, by the name of their key, in order."""
    form = _FORMS.get(rules.unicode)
    rewrites: list[tuple[str, Callable[[str], str]]] = []
    if form is not None:
        rewrites.append(("unicode", functools.partial(unicodedata.normalize, form)))
    if rules.romanian_letters == "comma":
        rewrites.append(("romanian_letters", functools.partial(with_commas, form=form)))
    if rules.whitespace == "collapse":
        rewrites.append(("whitespace", collapse_blanks))
    return rewrites


def with_commas(text: str, *, form: Literal["NFC", "NFKC"] | None) -> str:
    """Romanian letters with a comma below for those with a cedilla; a text in `form` stays in it."""
    while any(letter in text for letter in COMMA_OF_CEDILLA):
        for letter, comma in COMMA_OF_CEDILLA.items():
            text = text.replace(letter, comma)
        if form is not None:
            # A second cedilla, now beside a comma, joins the letter: s, cedilla, cedilla.
            text = unicodedata.normalize(form, text)
    return text


def collapse_blanks(text: str) -> str:
    """One space for each run of blanks in a line, trimmed lines, at most one empty line, trimmed ends."""
    text = _LINE_ENDS.sub("\n", _BLANKS.sub(" ", text))
    return _EMPTY_LINES.sub("\n\n", text).strip()


def _refused(document: Document, broken: Broken, *, where: str = "") -> Refused:
    message = f"has {broken.what}{where}, {broken.limit}."
    return Refused(broken.reason, document.place, message, is_bad_row=False)


def _with_text(document: Document, text: str) -> Document:
    return document if text == document.text else replace(document, text=text)
