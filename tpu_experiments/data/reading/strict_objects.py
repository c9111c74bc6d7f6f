"""JSON decoder that rejects repeated keys; Python's `json` silently takes the last value of one."""

import json
from typing import Any


class RepeatedKey(ValueError):
    """An object has a key twice; the message continues `is not JSON: `."""


class StrictDecoder:
    """JSON decoder that records the first repeated key of an object; not thread-safe."""

    def __init__(self) -> None:
        self.repeated: str | None = None
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object)

    def decode(self, text: str) -> Any:
        """Return the value of the whole text.

        Raises:
            ValueError: it is not JSON.
            RepeatedKey: one of its objects has a key twice.
            RecursionError: it is nested too deeply.
        """
        self.repeated = None
        value = self._decoder.decode(text)
        self.require_unique()
        return value

    def raw_decode(self, text: str, start: int) -> tuple[Any, int]:
        """Return the value that begins at `start`, and its end; repeated keys are left to `require_unique`.

        Raises:
            ValueError: it is not JSON.
            RecursionError: it is nested too deeply.
        """
        self.repeated = None
        return self._decoder.raw_decode(text, start)

    def require_unique(self) -> None:
        """Raise where the last decoded value repeats a key.

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
