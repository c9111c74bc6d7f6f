"""Where a configured path lies: from the working folder, else from the repository's root."""

import difflib
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def find_local(path: str) -> Path | None:
    """The existing file or folder that `path` names, or None.

    A relative path is tried from the working folder and then from the repository's root, since
    shipped samples are written `tpu_experiments/samples/...`.
    """
    if "://" in path:
        return None
    given = Path(path).expanduser()
    for candidate in (given, REPOSITORY / given):
        if candidate.exists():
            return candidate
    return None


def near_misses(path: str) -> str:
    """`Did you mean ...? ` when the parent folder holds a similar name, else what is missing."""
    given = Path(path).expanduser()
    parents = (given.parent, REPOSITORY / given.parent)
    folder = next((parent for parent in parents if parent.is_dir()), None)
    if folder is None:
        return f"The folder {given.parent} does not exist either. "
    names = sorted(entry.name for entry in folder.iterdir())
    near = difflib.get_close_matches(given.name, names, n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(near)} in {folder}? " if near else ""
