"""Records of a run that cannot be read, as after a power cut: kept beside their file, so that the run goes on."""

import posixpath

from tpu_experiments.io import paths


def put_aside(path: str, content: bytes) -> str:
    """Add what cannot be read of the file `path` to `<name>.bad<suffix>` beside it; returns that path."""
    stem, suffix = posixpath.splitext(path)
    place = f"{stem}.bad{suffix}"
    before = paths.read_bytes(place) if paths.exists(place) else b""
    if before and not before.endswith(b"\n"):
        before += b"\n"
    paths.write_bytes_atomic(place, before + content)
    return place
