"""The one exception for what a user can mend, and the near-miss suggestions it carries."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """Something the user can mend: key=value; what is wrong; the numbers; what to do. Exit code 2."""


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
