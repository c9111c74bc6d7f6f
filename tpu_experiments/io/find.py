"""Where a configured path lies, and the files below it: on the local disk, or behind an fsspec URL.

A relative local path is tried from the working folder and then from the repository's root, since shipped samples are
written `tpu_experiments/samples/...`.
"""

import difflib
import glob
from pathlib import Path
from typing import Any

from tpu_experiments.io.answers import answered
from tpu_experiments.io.paths import filesystem_of, is_remote

REPOSITORY = Path(__file__).parents[2]


def find_local(path: str) -> Path | None:
    """The existing file or folder that `path` names, as it was given where that is enough; None for a URL."""
    if is_remote(path):
        return None
    return next((place for place in _candidates(path) if place.exists()), None)


def shown_path(path: str) -> str:
    """A path inside the repository relative to its root, so that it reads the same everywhere; others as they are."""
    return path.removeprefix(f"{REPOSITORY}/")


def near_misses(path: str) -> str:
    """`Did you mean ...? ` when the parent folder holds a similar name, else what is missing."""
    given = Path(path.removeprefix("file://")).expanduser()
    folder = next((place.parent for place in _candidates(path) if place.parent.is_dir()), None)
    if folder is None:
        return f"The folder {given.parent} does not exist either. "
    return _did_you_mean(given.name, sorted(entry.name for entry in folder.iterdir()), folder=str(folder))


def is_glob(path: str) -> bool:
    """Whether `path` holds `*`, `?` or `[`."""
    return glob.has_magic(path)


def local_files(path: Path) -> dict[str, str]:
    """Path of every file below a folder, by its name relative to it; hidden files and folders are left out."""
    inside = {file.relative_to(path).as_posix(): str(file) for file in path.rglob("*") if file.is_file()}
    return _sorted_visible(inside)


def local_matches(pattern: str) -> dict[str, str]:
    """Path of every file that a local pattern names, by its name relative to the part before the first `*`."""
    for place in _candidates(pattern):
        found = [name for name in glob.glob(str(place), recursive=True) if Path(name).is_file()]
        if found:
            fixed = _fixed_part(str(place))
            return _sorted_visible({name.removeprefix(fixed): name for name in found})
    return {}


def remote_files(url: str) -> dict[str, str]:
    """URL of every file that a URL names (a file, a folder or a pattern), by its relative name; empty if none.

    Raises:
        Exception: what the file system raises when it is out of reach; there are dozens of types.
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
    """`Did you mean ...? ` when the remote folder holds a similar name; empty when it cannot be listed."""
    base, _, name = url.rstrip("/").rpartition("/")
    try:
        filesystem, key = answered(lambda: filesystem_of(base), place=base, operation="list")
        listed = answered(lambda: filesystem.ls(key, detail=False), place=base, operation="list")
        entries = [str(entry).rstrip("/").rpartition("/")[2] for entry in listed]
    except Exception:  # a hint only; the caller has a sentence without it
        return ""
    return _did_you_mean(name, sorted(entries), folder=base)


def remote_info(url: str) -> dict[str, Any]:
    """What the file system knows about one remote file: size, and any of etag, checksums and times.

    Raises:
        Exception: what the file system raises when there is no such file or it is out of reach.
    """

    def info() -> dict[str, Any]:
        filesystem, key = filesystem_of(url)
        return dict(filesystem.info(key))

    return answered(info, place=url, operation="look up")


def _candidates(path: str) -> tuple[Path, Path]:
    given = Path(path.removeprefix("file://")).expanduser()
    return given, REPOSITORY / given


def _fixed_part(pattern: str) -> str:
    """The folders before the first part with a `*`, with the slash."""
    parts = pattern.split("/")
    first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    return "".join(part + "/" for part in parts[:first])


def _sorted_visible(url_of_name: dict[str, str]) -> dict[str, str]:
    """By folders, then names; without what the Hub's client and editors hide behind a leading dot."""
    visible = [name for name in url_of_name if not any(part.startswith(".") for part in name.split("/"))]
    return {name: url_of_name[name] for name in sorted(visible, key=lambda name: name.split("/"))}


def _did_you_mean(name: str, names: list[str], *, folder: str) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(near)} in {folder}? " if near else ""
