"""Incremental reader of a JSON array; the Hub has files of 1 GB that are a single array.

The array is the whole file, or a member of an object, as in `{"version": 2, "data": [...]}`.

Bytes that are not UTF-8 become lone surrogates (PEP 383), so that they invalidate only the row they are in.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.documents import Refused
from tpu_experiments.data.reading.raw_rows import MOST_ROW_BYTES, RawRow, cut_off, place_of, too_long
from tpu_experiments.data.reading.strict_objects import RepeatedKey, StrictDecoder
from tpu_experiments.storage.streams import ByteStream

WRAPPER = "data"
"""Key of the array of rows, in a file that is one object."""
_BLANK = re.compile(r"[ \t\n\r]*")
_TAIL_CHARS = 16
"""An error this close to the end of the buffer may be a literal cut by the chunk (`-Infinity`, `\\ud800\\ud`)."""


def wrapped_at(head: bytes) -> int | None:
    """Return the byte offset of the array under `WRAPPER` in a file that is one object; None without one.

    An array of strings or of turns belongs to a single row, in a file with one object a line.

    Args:
        head: the beginning of the file, which must contain everything before the rows.
    """
    text = head.decode(errors="surrogateescape")
    decoder, position = json.JSONDecoder(), _after_blank(text, 0)
    while text[position : position + 1] in ("{", ","):
        try:
            key, position = decoder.raw_decode(text, _after_blank(text, position + 1))
            position = _after_blank(text, position)
            if text[position : position + 1] != ":":
                return None
            position = _after_blank(text, position + 1)
            if key == WRAPPER and text[position : position + 1] == "[":
                before = text[:position].encode(errors="surrogateescape")
                return len(before) if _begins_with_row(text, position) else None
            _, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return None
        position = _after_blank(text, position)
    return None


def _begins_with_row(text: str, position: int) -> bool:
    first = _after_blank(text, position + 1)
    if text[first : first + 1] != "{":
        return False
    try:
        row, _ = json.JSONDecoder().raw_decode(text, first)
    except (ValueError, RecursionError):
        return True  # the row is longer than `head`
    return not ({"role", "content"} <= row.keys() or {"from", "value"} <= row.keys())


def _after_blank(text: str, position: int) -> int:
    blank = _BLANK.match(text, position)
    assert blank is not None
    return blank.end()


def read_array(
    stream: ByteStream, *, chunks: Iterable[bytes], name: str, is_wrapped: bool = False
) -> Iterator[RawRow | Refused]:
    """Yield the rows of a JSON array.

    `chunks` are the decompressed bytes of `stream` without a byte order mark. With `is_wrapped` they begin inside an
    object, at its array of rows; what follows the array is verified too.

    The border between two elements is only known by parsing the first, so reading stops at the first syntax error,
    which is reported as one Refused with the row.
    """
    text = _Text(iter(chunks), name=name)
    assert text.peek() == "["
    text.position += 1
    number = 0
    while text.peek() not in ("]", ""):
        number += 1
        try:
            value, source = text.element()
        except EOFError:
            yield cut_off(_place(number, name=name), damage=stream.damage or "the file ends inside it")
            return
        except ConfigError:
            raise
        except (ValueError, RecursionError) as error:
            yield _broken(_place(number, name=name), str(error))
            return
        repeated = text.repeated
        if repeated:
            yield Refused("not_json", _place(number, name=name), f"is not JSON: {repeated}; mend or remove the row.")
        else:
            yield _row(value, source, name=name, number=number)
        following = text.peek()
        if following == ",":
            text.position += 1
        elif following not in ("]", ""):
            yield _broken(_place(number, name=name), f"expected , or ] after it but found {following!r}")
            return
    if text.peek() == "":
        damage = stream.damage or "the file ends without the ] of its array"
        yield cut_off(_place(number + 1, name=name), damage=damage)
        return
    text.position += 1
    if is_wrapped and not stream.damage:
        yield from _rest_of_object(text, number=number, name=name)
    elif text.peek():
        yield _broken(_place(number, name=name), f"more follows the array: {text.peek()!r}")
    elif stream.damage:
        yield cut_off(_place(number + 1, name=name), damage=stream.damage)


def _rest_of_object(text: "_Text", *, number: int, name: str) -> Iterator[Refused]:
    """Yield the syntax errors in the members of an object after its array of rows."""
    place = _place(number, name=name)
    try:
        while text.peek() == ",":
            text.position += 1
            key, _ = text.element()
            if text.peek() != ":":
                yield _broken(place, f"expected : after the key behind the rows but found {text.peek()!r}")
                return
            text.position += 1
            if key == WRAPPER:
                yield _broken(place, f"its object has the key {WRAPPER!r} twice")
                return
            text.element()
        closing = text.peek()
        text.position += 1
        following = text.peek() if closing == "}" else closing
    except ConfigError:
        raise
    except (EOFError, ValueError, RecursionError) as error:
        yield _broken(place, f"what follows the rows cannot be read ({error})")
        return
    if closing != "}" or following:
        yield _broken(place, f"expected the }} of its object but found {following or 'the end'!r}")


def _place(number: int, *, name: str) -> str:
    return place_of(number, unit="row", file=name)


def _row(value: Any, source: str, *, name: str, number: int) -> RawRow | Refused:
    if not isinstance(value, dict):
        kind = type(value).__name__
        return Refused(
            "wrong_type", _place(number, name=name), f"is a JSON {kind}, not an object; write an array of objects."
        )
    try:
        source.encode()
    except UnicodeEncodeError as error:
        byte = ord(source[error.start]) - 0xDC00
        before = source[: error.start][-20:]
        message = f"is not UTF-8: byte 0x{byte:02x} after {before!r}; convert the file to UTF-8."
        return Refused("not_utf8", _place(number, name=name), message)
    return RawRow(value, name, "row", number)


def _broken(place: str, complaint: str) -> Refused:
    return Refused("not_json", place, f"is not JSON: {complaint}; the file is not read any further; mend it.")


class _Text:
    """Buffer of a JSON text, filled on demand.

    Raises:
        ConfigError: on reading: a value is larger than any text.
    """

    def __init__(self, chunks: Iterator[bytes], *, name: str) -> None:
        self._chunks, self._name = chunks, name
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._strict = StrictDecoder()
        self._parse = self._strict.raw_decode
        self._text = ""
        self.position = 0

    @property
    def repeated(self) -> str:
        """Error message where the last element has an object with a repeated key, else ""."""
        try:
            self._strict.require_unique()
        except RepeatedKey as error:
            return str(error)
        return ""

    def peek(self) -> str:
        """Return the next character that is not white space; empty at the end."""
        while True:
            blank = _BLANK.match(self._text, self.position)
            assert blank is not None
            self.position = blank.end()
            if self.position < len(self._text):
                return self._text[self.position]
            if not self._more(1):
                return ""

    def element(self) -> tuple[Any, str]:
        """Return the next value, and its source text if any byte so far was not UTF-8.

        Reads on while the value may be incomplete.

        Raises:
            EOFError: the text ends inside it.
            ValueError: it is not JSON.
            RecursionError: it is nested too deeply.
        """
        start = self.peek()
        while True:
            try:
                value, end = self._parse(self._text, self.position)
            except json.JSONDecodeError as error:
                is_at_end = error.msg.startswith("Unterminated string") or error.pos >= len(self._text)
                may_be_cut = is_at_end or error.pos + _TAIL_CHARS >= len(self._text)
                if may_be_cut and self._more(len(self._text) - self.position):
                    continue
                if is_at_end:
                    raise EOFError from error
                found = self._text[error.pos : error.pos + 20].encode(errors="replace").decode()
                raise ValueError(f"{error.msg} at {found!r}") from error
            if start not in '{["' and end + _TAIL_CHARS > len(self._text) and self._more(1):
                continue  # a number may continue in the next chunk: 1 in `1.5e+10`
            source = self._text[self.position : end] if self._decoder.errors != "strict" else ""
            self.position = end
            return value, source

    def _more(self, num_chars: int) -> bool:
        """Read at least that many more characters; return False, with no change, if none are left.

        Callers ask for as much again as the buffer holds, so that a value of n characters is parsed O(log n) times.
        """
        if len(self._text) - self.position > MOST_ROW_BYTES:
            raise too_long(self._name)
        fresh: list[str] = []
        num_fresh = 0
        while num_fresh < max(num_chars, 1):
            chunk = next(self._chunks, None)
            fresh.append(self._decoded(chunk or b"", is_last=chunk is None))
            num_fresh += len(fresh[-1])
            if chunk is None:
                break
        if num_fresh == 0:
            return False
        self._text = self._text[self.position :] + "".join(fresh)
        self.position = 0
        return True

    def _decoded(self, chunk: bytes, *, is_last: bool) -> str:
        try:
            return self._decoder.decode(chunk, is_last)
        except UnicodeDecodeError:
            self._decoder.errors = "surrogateescape"  # from here on; the decoder has consumed nothing of the chunk
            return self._decoder.decode(chunk, is_last)
