"""Quarantine of unreadable records, as after a power cut, so that the run continues without them."""

import posixpath

from tpu_experiments.io import paths


def put_aside(path: str, content: bytes) -> str:
    """Append the unreadable `content` of file `path` to `<name>.bad<suffix>` next to it; return that path."""
    stem, suffix = posixpath.splitext(path)
    place = f"{stem}.bad{suffix}"
    before = paths.read_bytes(place) if paths.exists(place) else b""
    if before and not before.endswith(b"\n"):
        before += b"\n"
    paths.write_bytes_atomic(place, before + content)
    return place
