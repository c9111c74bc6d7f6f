"""Lookup of configured paths and the files below them, on the local disk or behind an fsspec URL.

A relative local path is resolved from the working folder, then from the repository's root, since the configs of shipped
samples say `tpu_experiments/samples/...`.
"""

import difflib
import glob
from pathlib import Path
from typing import Any

from tpu_experiments.io.answers import answered
from tpu_experiments.io.paths import filesystem_of, is_remote

REPOSITORY = Path(__file__).parents[2]


def find_local(path: str) -> Path | None:
    """Return the existing local file or folder of a configured path; None if there is none, and for a URL.

    The path is returned as it was given where it exists from the working folder.
    """
    if is_remote(path):
        return None
    return next((place for place in _candidates(path) if place.exists()), None)


def shown_path(path: str) -> str:
    """Return a path in the repository relative to its root, the same on all machines; others unchanged."""
    return path.removeprefix(f"{REPOSITORY}/")


def near_misses(path: str) -> str:
    """Return `Did you mean ...? ` if the parent folder has a similar name, else empty.

    If the parent folder is missing too, return a sentence that says so.
    """
    given = Path(path.removeprefix("file://")).expanduser()
    folder = next((place.parent for place in _candidates(path) if place.parent.is_dir()), None)
    if folder is None:
        return f"The folder {given.parent} does not exist either. "
    return _did_you_mean(given.name, sorted(entry.name for entry in folder.iterdir()), folder=str(folder))


def is_glob(path: str) -> bool:
    """Return whether `path` contains `*`, `?` or `[`."""
    return glob.has_magic(path)


def local_files(path: Path) -> dict[str, str]:
    """Return the path of every file below a folder, by its relative name; hidden ones are left out."""
    inside = {file.relative_to(path).as_posix(): str(file) for file in path.rglob("*") if file.is_file()}
    return _sorted_visible(inside)


def local_matches(pattern: str) -> dict[str, str]:
    """Return the path of every file that a local pattern matches, by its name relative to the fixed part."""
    for place in _candidates(pattern):
        found = [name for name in glob.glob(str(place), recursive=True) if Path(name).is_file()]
        if found:
            fixed = _fixed_part(str(place))
            return _sorted_visible({name.removeprefix(fixed): name for name in found})
    return {}


def remote_files(url: str) -> dict[str, str]:
    """Return the URL of every file of a URL (a file, a folder or a pattern), by its relative name.

    Empty if there is none.

    Raises:
        Exception: the file system is out of reach; the type is that of the file system's client.
    """
    filesystem, key = answered(lambda: filesystem_of(url), place=url, operation="list")
    if is_glob(key):
        found = answered(lambda: filesystem.glob(key, detail=True), place=url, operation="list")
        fixed = _fixed_part(key)
    else:
        found = answered(lambda: filesystem.find(key, detail=True), place=url, operation="list")
        fixed = key.rstrip("/") + "/"
    names = [name for name, about in found.items() if about.get("type") == "file" and not name.endswith("/")]
    if names == [key]:
        return {key.rpartition("/")[2]: url}
    return _sorted_visible({name.removeprefix(fixed): filesystem.unstrip_protocol(name) for name in names})


def remote_near_misses(url: str) -> str:
    """Return `Did you mean ...? ` if the remote folder has a similar name; empty if it cannot be listed."""
    base, _, name = url.rstrip("/").rpartition("/")
    try:
        filesystem, key = answered(lambda: filesystem_of(base), place=base, operation="list")
        listed = answered(lambda: filesystem.ls(key, detail=False), place=base, operation="list")
        entries = [str(entry).rstrip("/").rpartition("/")[2] for entry in listed]
    except Exception:  # only a hint is lost
        return ""
    return _did_you_mean(name, sorted(entries), folder=base)


def remote_info(url: str) -> dict[str, Any]:
    """Return the file system's metadata of one remote file: size, and any of etag, checksums and times.

    Raises:
        Exception: there is no such file, or the file system is out of reach; the type is that of its client.
    """

    def info() -> dict[str, Any]:
        filesystem, key = filesystem_of(url)
        return dict(filesystem.info(key))

    return answered(info, place=url, operation="look up")


def _candidates(path: str) -> tuple[Path, Path]:
    given = Path(path.removeprefix("file://")).expanduser()
    return given, REPOSITORY / given


def _fixed_part(pattern: str) -> str:
    """Return the folders before the first component with a wildcard, with a trailing slash."""
    parts = pattern.split("/")
    first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    return "".join(part + "/" for part in parts[:first])


def _sorted_visible(url_of_name: dict[str, str]) -> dict[str, str]:
    """Sort by folders, then names, without names with a leading dot (of the Hub's client and editors)."""
    visible = [name for name in url_of_name if not any(part.startswith(".") for part in name.split("/"))]
    return {name: url_of_name[name] for name in sorted(visible, key=lambda name: name.split("/"))}


def _did_you_mean(name: str, names: list[str], *, folder: str) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(near)} in {folder}? " if near else ""
