"""Rows as read from a file, before parsing."""

from typing import Any, NamedTuple

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.documents import TEXT_SHOWN, Refused, beginning

MOST_ROW_BYTES = 2**28
"""Largest row (characters, in an array or table) held in memory; a hole in a sparse file is one row of zeros."""


class RawRow(NamedTuple):
    """One unparsed row and its place; cheap to create and to send to another process."""

    data: bytes | dict[str, Any]
    """A line of JSON as in the file, or the fields by name."""
    file: str
    unit: str
    """What `number` counts, from 1: `line` or `row`."""
    number: int

    @property
    def place(self) -> str:
        """Human-readable place: `line 17 of a.jsonl`."""
        return place_of(self.number, unit=self.unit, file=self.file)

    @property
    def beginning(self) -> str:
        """The beginning of the row, on one line."""
        if isinstance(self.data, bytes):
            return beginning(self.data[: 8 * TEXT_SHOWN].decode(errors="replace"))
        fields = list(self.data.items())[:TEXT_SHOWN]
        return beginning(", ".join(f"{name}: {str(value)[: 2 * TEXT_SHOWN]}" for name, value in fields))


def place_of(number: int, *, unit: str, file: str) -> str:
    """Format a place: `line 17 of a.jsonl`."""
    return f"{unit} {number} of {file}"


def cut_off(place: str, *, damage: str) -> Refused:
    """Return the single report for a truncated file: this row and all after it could not be read."""
    message = f"could not be read, nor could anything after it: {damage}; download or write the file again."
    return Refused("truncated", place, message)


def too_long(place: str) -> ConfigError:
    """Return the error for a row of more than `MOST_ROW_BYTES`."""
    return ConfigError(
        f"{place}; it has more than {MOST_ROW_BYTES:,} bytes, as no text has: the file is damaged, sparse or made to "
        "fill the memory; find out who made it."
    )


def not_utf8(error: UnicodeDecodeError, *, place: str) -> Refused:
    """Return the report for a line that could not be decoded."""
    line = error.object
    hint = "; it begins as UTF-16 does" if line[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
    return Refused(
        "not_utf8",
        place,
        f"is not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line "
        f"({error.reason}{hint}); convert the file to UTF-8.",
    )
