"""Fields of a row, a turn or a content part, with a record of which were read.

What a format does not ask a `Record` for is left in `Record.unread`, so that no field is dropped without a word.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tpu_experiments.data.reading.names import normal

Fields = Mapping[str, Any]

MAX_NAMES_SHOWN = 20
MAX_NAME_CHARS = 60


class BadRow(Exception):
    """A row that violates its format: `reason` is a slug for the counts, the message is for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Record:
    """Fields by name, and which of them were read."""

    def __init__(self, fields: Fields, *, renamed: Mapping[str, str] | None = None) -> None:
        """Take fields, of which `renamed` names some otherwise: the format's name to the file's, or to "" for none."""
        self.fields = fields
        self._renamed = renamed or {}
        self._taken = {*self._renamed, *self._renamed.values()}
        self._read: set[str] = set()
        self._by_normal: dict[str, list[str]] | None = None

    def find(self, *names: str) -> tuple[str, Any] | None:
        """Return the file's name and the value of the first of these fields that has a value, and mark it read.

        Names match in normal form (names.py). Without a value in any, an empty one is returned, or None where all are
        missing or null. Further fields of these names are marked read where they say the same.
        """
        return self._chosen([own for name in names for own in self._own(name)])

    def find_all(self, canonical: str, *, is_meant: Callable[[str], bool]) -> tuple[str, Any] | None:
        """Do the same for every field whose name is meant, or for the one that `renamed` gives as `canonical`."""
        if canonical in self._renamed:
            return self.find(canonical)
        return self._chosen([name for name in self.names() if is_meant(name)])

    def peek(self, *names: str) -> Any:
        """Return the value that `find` would, without marking it; None where there is none."""
        before = set(self._read)
        found = self.find(*names)
        self._read = before
        return None if found is None else found[1]

    def named(self, *names: str) -> str | None:
        """Return the file's name of the first of these fields that the row has, be it null; None where it has none."""
        return next((own for name in names for own in self._own(name)), None)

    def names(self) -> Iterator[str]:
        """Yield the names of fields that have a value, were not read, and are not mentioned by `renamed`."""
        known = self._taken | self._read
        return (name for name, value in self.fields.items() if name not in known and not is_empty(value))

    def mark(self, *own: str) -> None:
        """Mark fields as read, by the file's names."""
        self._read.update(own)

    def unmark(self, own: str) -> None:
        """Mark a field as not read after all."""
        self._read.discard(own)

    @property
    def unread(self) -> list[str]:
        """Names of the fields that have a value and were not read, as one line of text each."""
        return [
            shown_name(name) for name, value in self.fields.items() if name not in self._read and not is_empty(value)
        ]

    def _own(self, name: str) -> list[str]:
        if name in self._renamed:
            own = self._renamed[name]
            return [own] if own and own in self.fields else []
        if self._by_normal is None:
            self._by_normal = {}
            for own in self.fields:
                if own not in self._taken:
                    self._by_normal.setdefault(normal(own), []).append(own)
        found = self._by_normal.get(normal(name), [])
        return found if len(found) < 2 else sorted(found, key=lambda own: own != name)

    def _chosen(self, candidates: list[str]) -> tuple[str, Any] | None:
        given = [own for own in candidates if self.fields[own] is not None]
        if not given:
            return None
        chosen = next((own for own in given if not is_empty(self.fields[own])), given[0])
        value = self.fields[chosen]
        self.mark(*(own for own in given if self.fields[own] == value))
        return chosen, value


def is_empty(value: Any) -> bool:
    """Return whether a value is null, blank text, or a list or object of nothing else."""
    if isinstance(value, str):
        return not value or value.isspace()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
        elif part is not None and not (isinstance(part, str) and not part.strip()):
            return False
    return True


def shown_name(name: str) -> str:
    """Return a field's name as printable text of at most `MAX_NAME_CHARS` characters."""
    text = str(name)[:MAX_NAME_CHARS].encode("utf-8", "backslashreplace").decode()
    return "".join(character if character.isprintable() else " " for character in text)


def names_of(fields: Fields) -> str:
    """List the names of a row's fields for an error message."""
    names = [str(name)[:40] for name in fields]
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return (", ".join(names[:MAX_NAMES_SHOWN]) or "no field") + more


def encodable(text: str, *, name: str) -> str:
    """Return the text; raise for half of a UTF-16 pair, which JSON can hold and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        message = f"holds half of a UTF-16 pair ({half}) at character {error.start} of {name}; mend or remove the row."
        raise BadRow("surrogate", message) from error
    return text


def from_json(value: Any) -> Any:
    """Parse a text as JSON; return the text itself if it is none, and any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        return value


def list_from_json(value: Any) -> Any:
    """Parse a text that holds a JSON list, as a cell of a table may; return any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    found = from_json(value)
    return found if isinstance(found, list) else value
