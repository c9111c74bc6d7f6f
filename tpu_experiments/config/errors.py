"""The one exception for what a user can mend, and the near-miss suggestions it carries."""

import difflib
import traceback
from collections.abc import Iterable


class ConfigError(ValueError):
    """Something the user can mend: key=value; what is wrong; the numbers; what to do. Exit code 2."""


def failure_of(error: Exception) -> str:
    """What went wrong in a module of the user's own when it was imported, and where."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    file, line = (error.filename, error.lineno) if isinstance(error, SyntaxError) else (place.filename, place.lineno)
    text = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"its module cannot be imported: {type(error).__name__}: {text} (line {line} of {file}); mend it."


def suggest(name: str, known: Iterable[str]) -> str:
    """`Did you mean X? ` when a known name is close, then the names that exist."""
    names = sorted(known)
    near = nearest(name, names)
    hint = f"Did you mean {near!r}? " if near else ""
    return f"{hint}Names that exist: {', '.join(names) or 'none'}."


def nearest(name: str, names: list[str]) -> str | None:
    """The likeliest name: alike, the same letters in another order, one that begins the other, or a part of it."""
    alike = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    swapped = [known for known in names if sorted(known) == sorted(name)]
    begun = [known for known in names if known.startswith(name) or name.startswith(known)] if name else []
    holding = [known for known in names if len(name) >= 3 and name in known]
    return next(iter(swapped or alike or begun or holding), None)
