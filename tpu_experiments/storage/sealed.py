"""Sealed files, which contain their own SHA-256, so that a reader detects any change.

The digest is computed with 64 zeros in its place. A JSON object has it as `seal`, its first entry; a binary format has
it in a text header.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.storage import paths

SEAL = "seal"
UNSEALED = "sha256:" + 64 * "0"
"""Placeholder of the digest in content to be sealed, before anything else of this form."""
DIGEST = re.compile(rb"sha256:[0-9a-f]{64}")


class DamagedFile(ConfigError):
    """A file of a prepared folder is missing, or differs from what was written there."""


def sealed(content: bytes) -> bytes:
    """Return the content with its digest in place of the first `UNSEALED`."""
    before, mark, after = content.partition(UNSEALED.encode())
    assert mark, "content without a place for its digest"
    return b"".join([before, b"sha256:", hashlib.sha256(content).hexdigest().encode(), after])


def require_seal(content: bytes, *, path: str) -> None:
    """Check the digest in sealed content.

    Raises:
        DamagedFile: there is none, or the content does not match it; `path` is for the message.
    """
    found = DIGEST.search(content)
    if found is None:
        raise DamagedFile(f"{path}; the file is damaged: the checksum in it is gone.")
    digest = hashlib.sha256(content[: found.start()])
    digest.update(UNSEALED.encode())
    digest.update(memoryview(content)[found.end() :])
    if digest.hexdigest().encode() != found[0].removeprefix(b"sha256:"):
        raise DamagedFile(f"{path}; the file is damaged: its content does not match the checksum in it.")


def write_sealed_json(path: str, values: Mapping[str, Any], *, indent: int | None = None) -> None:
    """Replace a file by the JSON of `values`, sealed."""
    text = json.dumps({SEAL: UNSEALED, **values}, indent=indent, ensure_ascii=False)
    paths.write_bytes_atomic(path, sealed(text.encode()))


def read_sealed_json(path: str, *, expected: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read the values of a file of `write_sealed_json` and check its digest.

    Args:
        expected: entries that it must have, so that a file from another folder is detected.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedFile: it was changed, or is from another folder.
    """
    content = paths.read_bytes(path)
    require_seal(content, path=path)
    values: dict[str, Any] = json.loads(content)
    del values[SEAL]
    for key, value in (expected or {}).items():
        if values.get(key) != value:
            raise DamagedFile(f"{path}; it belongs elsewhere: {key} is {values.get(key)!r} there, not {value!r}.")
    return values


def require_sha256(content: bytes, sha256: str, *, path: str) -> None:
    """Check the content of the file `path` against a digest.

    Raises:
        DamagedFile: they differ.
    """
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise DamagedFile(f"{path}; the file is damaged: its sha256 is {found}, and {sha256} was written.")
