"""Which language a text is in: py3langid's naive Bayes over byte n-grams (Lui & Baldwin, ACL 2012), offline."""

import functools

from py3langid.langid import MODEL_FILE, LanguageIdentifier

from tpu_experiments.config.errors import ConfigError, suggest

_CODES = """
ace af am an ar ary arz as az ba bcl be bg bn br bs ca crh cs cy da de dz el en eo es et eu ext fa fi fo fr fuv fy ga
gcf gcr gd gl gom grc gu gug guw ha hbo he hi hr ht hu hy id ig is it ja jv ka kab kik kk km kn ko ku ky la lb lg lij
ln lo lt ltg lv mg mk ml mn mr ms mt my ne nl nn no nso oc om or pa pcm pl ps pt qu ro ru rw sa sdh se si sk sl sn so
sq sr st sv sw ta te tg th tk tl tr tt ug uk ur uz uzs vec vi vo wa wuu xh yo yue zh zu zxx
"""
LANGUAGES = tuple(_CODES.split())
"""Codes that the model of py3langid 0.4 knows; listed, so that a wrong one is found without loading it (1 s)."""

PIECE_CHARS = 1000
"""A text of more than three such pieces is judged by its first, middle and last one: 320 characters of Romanian prose
are always recognised, and a long conversation costs what 3,000 characters do (2 ms)."""


def check_language(code: str, *, key: str) -> None:
    """Refuse a code that the model does not know; `key` is where it was set.

    Raises:
        ConfigError: with the nearest code.
    """
    if code not in LANGUAGES:
        raise ConfigError(f"{key}={code}; there is no such language code. {suggest(code, LANGUAGES)}")


def language_probability(text: str, *, code: str) -> float:
    """Probability that `text` is in the language `code`, of all `LANGUAGES`; the first call of a process loads 130 MiB.

    Without a letter of any language all are equally likely.
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
