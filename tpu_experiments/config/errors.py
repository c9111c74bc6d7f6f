"""ConfigError, the exception for everything that a user can fix, and suggestions of similar names."""

import difflib
import traceback
from collections.abc import Iterable

from tpu_experiments.config.escaping import for_terminal


class ConfigError(ValueError):
    """Error that the user can fix; exit code 2.

    The text has the form: key=value; what is wrong; the numbers; what to do. Controls in it, as names from files may
    have them, are written as escapes.
    """

    def __str__(self) -> str:
        return for_terminal(super().__str__())


def one_line(error: BaseException, *, most: int = 200) -> str:
    """Return the kind of an error and at most so many characters of its text, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:most]}".removesuffix(": ")


def failure_of(error: Exception) -> str:
    """Return what went wrong, and where, when a module of the user's own was imported."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    file, line = (error.filename, error.lineno) if isinstance(error, SyntaxError) else (place.filename, place.lineno)
    text = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"its module cannot be imported: {type(error).__name__}: {text} (line {line} of {file}); mend it."


def suggest(name: str, known: Iterable[str]) -> str:
    """Return `Did you mean X? ` if a known name is close, then the existing names."""
    names = sorted(known)
    near = nearest(name, names)
    hint = f"Did you mean {near!r}? " if near else ""
    return f"{hint}Names that exist: {', '.join(names) or 'none'}."


def nearest(name: str, names: list[str]) -> str | None:
    """Return the likeliest name: the same but for case and signs, similar, an anagram, a prefix or a part of it."""
    same = [known for known in names if _bare(known) == _bare(name)] if _bare(name) else []
    if same:
        return same[0]
    alike = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    swapped = [known for known in names if sorted(known) == sorted(name)]
    begun = [known for known in names if known.startswith(name) or name.startswith(known)] if name else []
    holding = [known for known in names if len(name) >= 3 and name in known]
    return next(iter(swapped or alike or begun or holding), None)


def _bare(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())
