"""Cleaning rules for documents, each optional and counted; config/data_schema.py documents them.

The language of a text is identified offline by py3langid's naive Bayes over byte n-grams (Lui & Baldwin, ACL 2012).
"""

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

from py3langid.langid import MODEL_FILE, LanguageIdentifier

from tpu_experiments.config.data_schema import CleanConfig
from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.data.documents import Document, Refused

_CODES = """
ace af am an ar ary arz as az ba bcl be bg bn br bs ca crh cs cy da de dz el en eo es et eu ext fa fi fo fr fuv fy ga
gcf gcr gd gl gom grc gu gug guw ha hbo he hi hr ht hu hy id ig is it ja jv ka kab kik kk km kn ko ku ky la lb lg lij
ln lo lt ltg lv mg mk ml mn mr ms mt my ne nl nn no nso oc om or pa pcm pl ps pt qu ro ru rw sa sdh se si sk sl sn so
sq sr st sv sw ta te tg th tk tl tr tt ug uk ur uz uzs vec vi vo wa wuu xh yo yue zh zu zxx
"""
LANGUAGES = tuple(_CODES.split())
"""Language codes of the model of py3langid 0.4; listed here to reject a wrong code without loading it (1 s)."""

PIECE_CHARS = 1000
"""A text longer than three such pieces is judged by its first, middle and last piece: 320 characters of Romanian prose
are always recognised, and a long conversation takes the time of 3,000 characters (2 ms)."""


def check_language(code: str, *, key: str) -> None:
    """Raise for a language code that the model does not know; `key` is the config key that set it.

    Raises:
        ConfigError: the code is unknown; the message suggests the nearest one.
    """
    if code not in LANGUAGES:
        raise ConfigError(f"{key}={code}; there is no such language code. {suggest(code, LANGUAGES)}")


def language_probability(text: str, *, code: str) -> float:
    """Return the probability, among all `LANGUAGES`, that `text` is in the language `code`.

    The first call of a process loads 130 MiB. In a text without letters all languages are equally likely.
    """
    return dict(_model().rank(_excerpt(text)))[code]


@functools.cache
def _model() -> LanguageIdentifier:
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def _excerpt(text: str) -> str:
    if len(text) <= 3 * PIECE_CHARS:
        return text
    middle = (len(text) - PIECE_CHARS) // 2
    return "\n".join((text[:PIECE_CHARS], text[middle : middle + PIECE_CHARS], text[-PIECE_CHARS:]))


COMMA_OF_CEDILLA = {"Ş": "Ș", "ş": "ș", "Ţ": "Ț", "ţ": "ț"}

_FORMS: dict[str, Literal["NFC", "NFKC"]] = {"nfc": "NFC", "nfkc": "NFKC"}
_BETWEEN_PARAGRAPHS = re.compile(r"\n\s*\n")
_BLANKS = re.compile(r"[^\S\n]+")  # with no-break spaces, carriage returns and tabs
_LINE_ENDS = re.compile(r" ?\n ?")
_EMPTY_LINES = re.compile(r"\n{3,}")


def check_rules(rules: CleanConfig, *, source: str, kind: str) -> None:
    """Raise for rules of the source `source` that cannot apply to its `kind` (text or chat).

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
    if rules.scope == "paragraph" and kind != "text":
        raise ConfigError(
            f"{key}.scope=paragraph; {source} gives conversations, of which no part is left out; set "
            f"{key}.scope=document."
        )
    if rules.max_paragraphs is not None and rules.scope != "paragraph":
        raise ConfigError(
            f"{key}.max_paragraphs={rules.max_paragraphs}; paragraphs are only checked with {key}.scope=paragraph; "
            "set that too, or leave max_paragraphs out."
        )


class Broken(NamedTuple):
    """A rule that a text violates: `has <what>, <limit>.`"""

    reason: str
    what: str
    limit: str


class Cleaner:
    """Cleaning by the rules of one source; picklable, constructed once per process.

    Cleaning is idempotent: a kept document is not changed by a second pass.
    """

    def __init__(self, rules: CleanConfig) -> None:
        self.rules = rules
        self.changes: Counter[str] = Counter()
        """Documents changed: `unicode`, `romanian_letters`, `whitespace`. Paragraphs left out: `paragraphs_<reason>`
        by the rule they violate, `paragraphs_over_max` for those after the last one kept."""
        self._rewrites = _rewrites(rules)

    def clean(self, document: Document) -> Document | Refused:
        """Return the cleaned document, or the reason that it is left out."""
        if document.is_empty:
            return Refused("empty", document.place, "has no text.", is_bad_row=False)
        if document.rejected is not None:
            return self._pair(document, rejected=document.rejected)
        if document.messages is not None:
            return self._conversation(document, messages=document.messages)
        (text,) = self._rewritten([document.text or ""])
        if self.rules.scope == "paragraph":
            return self._paragraphs(document, text=text)
        broken = self._broken(text) or self._foreign(text)
        return _refused(document, broken) if broken else _with_text(document, text)

    def _pair(self, document: Document, *, rejected: Document) -> Document | Refused:
        """Clean both conversations of a preference pair, which counts as one document changed."""
        before = Counter(self.changes)
        sides = [self.clean(side) for side in (replace(document, rejected=None), rejected)]
        self.changes = before + Counter(set(self.changes - before))
        for side in sides:
            if isinstance(side, Refused):
                return side
        chosen, other = (side for side in sides if isinstance(side, Document))
        return replace(chosen, rejected=other)

    def _conversation(self, document: Document, *, messages: tuple[tuple[str, str], ...]) -> Document | Refused:
        reasoning = document.reasoning
        rewritten = self._rewritten([*(content for _, content in messages), *reasoning.values()])
        texts, thoughts = rewritten[: len(messages)], rewritten[len(messages) :]
        for turn, text in enumerate(texts, start=1):
            if broken := self._broken(text):
                return _refused(document, broken, where=f" in turn {turn}")
        if broken := self._foreign("\n".join(texts)):
            return _refused(document, broken)
        cleaned = tuple((role, text) for (role, _), text in zip(messages, texts, strict=True))
        if thoughts != list(reasoning.values()):
            document = document.with_reasoning(dict(zip(reasoning, thoughts, strict=True)))
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
        """Apply the rewriting rules to the texts of one document."""
        for name, rewrite in self._rewrites:
            rewritten = [rewrite(text) for text in texts]
            if rewritten != texts:
                self.changes[name] += 1
            texts = rewritten
        return texts

    def _broken(self, text: str) -> Broken | None:
        """Return the first rule on length, words and punctuation that the text violates."""
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
        """Return the language rule if the text violates it; the slowest rule, so it is checked last."""
        rules = self.rules
        if rules.language is None:
            return None
        probability = language_probability(text, code=rules.language)
        if probability >= rules.language_min_probability:
            return None
        limit = f"below clean.language_min_probability={rules.language_min_probability}"
        return Broken("language", f"probability {probability:.3f} of clean.language={rules.language}", limit)


def _rewrites(rules: CleanConfig) -> list[tuple[str, Callable[[str], str]]]:
    """Return the rewriting rules in order, each with the name of its key."""
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
    """Replace Romanian letters with cedilla by those with comma below; a text in `form` stays in it."""
    while any(letter in text for letter in COMMA_OF_CEDILLA):
        for letter, comma in COMMA_OF_CEDILLA.items():
            text = text.replace(letter, comma)
        if form is not None:
            # Normalising may compose a second cedilla with the letter (s, cedilla, cedilla), hence the loop.
            text = unicodedata.normalize(form, text)
    return text


def collapse_blanks(text: str) -> str:
    """Collapse blanks to one space in a line and to one empty line between lines, and trim both."""
    text = _LINE_ENDS.sub("\n", _BLANKS.sub(" ", text))
    return _EMPTY_LINES.sub("\n\n", text).strip()


def _refused(document: Document, broken: Broken, *, where: str = "") -> Refused:
    message = f"has {broken.what}{where}, {broken.limit}."
    return Refused(broken.reason, document.place, message, is_bad_row=False)


def _with_text(document: Document, text: str) -> Document:
    return document if text == document.text else replace(document, text=text)
