"""JSON whose objects name every key once; Python's reader keeps the last value of a key that comes twice."""

import json
from typing import Any


class RepeatedKey(ValueError):
    """An object names a key twice; the message goes on from `is not JSON: `."""


class StrictDecoder:
    """Decodes JSON and remembers the first key that an object of it repeats; not for several threads at once."""

    def __init__(self) -> None:
        self.repeated: str | None = None
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object)

    def decode(self, text: str) -> Any:
        """The value of the whole text.

        Raises:
            ValueError: it is not JSON.
            RepeatedKey: an object of it names a key twice.
            RecursionError: it is nested too deeply.
        """
        self.repeated = None
        value = self._decoder.decode(text)
        self.require_unique()
        return value

    def raw_decode(self, text: str, start: int) -> tuple[Any, int]:
        """The value that begins at `start`, and where it ends; a repeated key is left to `require_unique`.

        Raises:
            ValueError: it is not JSON.
            RecursionError: it is nested too deeply.
        """
        self.repeated = None
        return self._decoder.raw_decode(text, start)

    def require_unique(self) -> None:
        """Raise `RepeatedKey` where the last value repeats a key.

        Raises:
            RepeatedKey: it does.
        """
        if self.repeated is not None:
            raise RepeatedKey(f"an object of it has the key {self.repeated[:40]!r} twice")

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs) and self.repeated is None:
            names = [name for name, _ in pairs]
            self.repeated = next(name for name in names if names.count(name) > 1)
        return found
