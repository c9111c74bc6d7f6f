"""Checks of the form of paths and URLs in a config, without access to a disk or bucket.

A malformed URL, with a slash or its bucket missing (`gs://$BUCKET` with BUCKET unset), would otherwise be taken for the
name of a local folder.
"""

import importlib.util
import re
from dataclasses import field
from typing import Any, Literal

from omegaconf import MISSING

Kind = Literal["folder", "file", "source", "input", "model", "local"]
"""`folder`, `file`: written or read by this program, local or in a bucket. `source`: a folder that is only read, which
may be on the Hub too (hf://owner/name). `input`: documents to read, which may be on the Hub or the web. `model`: a
local folder or a Hub id. `local`: on this machine's disk alone."""

MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4095  # Linux: NAME_MAX, and PATH_MAX with its final zero
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/*)(.*)", re.DOTALL)
BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")  # cloud.google.com/storage/docs/buckets#naming
BUCKETS = ("gs", "gcs")
HUB_MODEL = re.compile(r"(?!datasets/|spaces/)[\w.-]+/[\w.-]+(@[\w./%-]+?)?(/[^/]+)*/?")
ONLY_READ = ("http", "https", "hf")
WRITTEN = (*BUCKETS, "memory")
"""Where runs live: leases, last steps and repeated requests were tried with these stores alone."""
SUPPORTED = {"folder": "gs://bucket/folder", "file": "gs://bucket/file", "input": "gs://, hf:// or https://"}
SUPPORTED["source"] = "gs://bucket/folder or hf://owner/name"


def place(kind: Kind, *, default: Any = MISSING) -> Any:
    """Return a field for a path or URL, whose form is checked with the config."""
    return field(default=default, metadata={"place": kind})


def place_problem(key: str, value: str, *, kind: Kind) -> str | None:
    """Return what is wrong with a path or URL, as one sentence; None if nothing is."""
    shown = value.encode("utf-8", "backslashreplace").decode()
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
    shown = shown if len(shown) <= 200 else f"{shown[:200]}... ({len(shown)} characters)"
    why = _what_is_wrong(value, kind=kind)
    return None if why is None else f"{key}={shown}; {why}"


def _what_is_wrong(value: str, *, kind: Kind) -> str | None:
    if not value.strip():
        return "it is empty; name a folder or file, or leave the key out."
    try:
        value.encode()
    except UnicodeEncodeError:
        return "it is not UTF-8; use a name that is."
    control = next((c for c in value if ord(c) < 32 or ord(c) == 127), None)
    if control is not None:
        return f"it holds the control character {control!r}, which no name may have; remove it."
    url = URL.fullmatch(value.rpartition("::")[2])
    if url is None:
        return _wrong_local(value, kind=kind)
    scheme, slashes, rest = url.groups()
    if len(slashes) == 1 or (not slashes and _is_known(scheme.lower())):
        return (
            f"it is neither a URL nor a usual path; a URL begins with {scheme}:// (write ./{value} for a local name)."
        )
    if not slashes:
        return _wrong_local(value, kind=kind)
    if scheme == "file":
        return _wrong_local("/" * (len(slashes) - 2) + rest, kind=kind)
    return _wrong_url(scheme, rest, kind=kind, num_slashes=len(slashes))


def _wrong_url(scheme: str, rest: str, *, kind: Kind, num_slashes: int) -> str | None:
    supported = f"a local path or {SUPPORTED[kind]}" if kind in SUPPORTED else "a local path"
    if kind == "model":
        return "a model is not read from a URL; give a local folder or a Hub id owner/name."
    if kind == "local":
        return "it must be on this machine's disk; give a local path."
    if not _is_known(scheme):
        return f"there is no storage {scheme}://; supported: {supported}."
    if scheme in ONLY_READ and kind in ("folder", "file"):
        return f"{scheme}:// is for reading data only; write {supported}."
    if scheme not in WRITTEN and kind in ("folder", "file") and _is_fsspecs_own(scheme):
        return (
            f"runs are kept on a disk or in gs:// alone: what loses nothing when a machine or a request fails was not "
            f"tried with {scheme}://; write {supported}, and copy it afterwards."
        )
    missing = _missing_package(scheme)
    if missing is not None:
        return f"{scheme}:// needs the package {missing}, which is not installed; supported here: {supported}."
    if kind == "source" and scheme in ONLY_READ:
        if scheme == "hf" and HUB_MODEL.fullmatch(rest):
            return None
        return f"it is no folder of a model repository on the Hub; supported: {supported}."
    bucket, _, below = rest.partition("/")
    if num_slashes > 2 or (not bucket and scheme != "memory"):
        return f"the bucket's name is missing after {scheme}:// (is a variable empty?); write {scheme}://bucket/folder."
    if scheme in BUCKETS and not BUCKET.fullmatch(bucket):
        return (
            f"{bucket!r} is no name of a bucket (3 to 222 of a-z, 0-9, ., _ and -, the first and last a letter or "
            f"digit); write {scheme}://bucket/folder."
        )
    if scheme not in ONLY_READ and ("//" in below or below.startswith("/")):
        return "there is an empty name between two slashes (is a variable empty?); remove one of them."
    if scheme in BUCKETS and len(below.encode()) > 1024:
        return f"the name below the bucket has {len(below.encode())} bytes and a bucket takes 1024; shorten it."
    if scheme in BUCKETS and {".", ".."} & set(below.split("/")):
        return "a bucket has no . and no ..; write the folder itself."
    return None


def _wrong_local(path: str, *, kind: Kind) -> str | None:
    if not path:
        return "it names nothing after file://; write the path."
    if path.startswith("~") and kind in ("folder", "file", "source"):
        return "~ is not replaced here, so a folder of that name would be made; write $HOME/... or the whole path."
    longest = max(path.split("/"), key=lambda name: len(name.encode()))
    if len(longest.encode()) > MAX_NAME_BYTES:
        return f"one of its names has {len(longest.encode())} bytes and a disk takes {MAX_NAME_BYTES}; shorten it."
    if len(path.encode()) > MAX_PATH_BYTES:
        return f"it has {len(path.encode())} bytes and Linux takes {MAX_PATH_BYTES}; shorten it."
    return None


def _is_known(scheme: str) -> bool:
    from fsspec.registry import known_implementations, registry  # 0.1 s, for a URL only

    return scheme in known_implementations or scheme in registry


def _is_fsspecs_own(scheme: str) -> bool:
    """Return whether fsspec has this file system by itself, as it has `s3`; somebody's class is registered apart."""
    from fsspec.registry import known_implementations

    return scheme in known_implementations


def _missing_package(scheme: str) -> str | None:
    """Return the package that a file system needs, if it is not installed."""
    from fsspec.registry import known_implementations, registry

    if scheme in registry or scheme not in known_implementations:
        return None
    package = known_implementations[scheme]["class"].partition(".")[0]
    return None if importlib.util.find_spec(package) is not None else package
