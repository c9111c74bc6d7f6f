"""Sources of data in a draft: names, places, and what every converted source has in common."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu_experiments.tasks.convert.table import Draft

DATA_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".tsv", ".txt", ".gz", ".bz2", ".xz", ".zst")
SLICE = re.compile(r"(\w+)\[[^\]]*\]")
"""A split of `datasets` with a part of its rows."""
FORMAT_KINDS = {
    "text": "text",
    **dict.fromkeys(("messages", "instruction", "prompt_completion", "question_answer", "alternating"), "chat"),
    **dict.fromkeys(("explicit_prompt", "implicit_prompt", "unpaired"), "preference"),
}
"""Kind of the sources of each format."""


def add_source(draft: Draft, path: str, values: Mapping[str, Any], *, of: str) -> str:
    """Add a source under a name of its own, with the rules that other programs have; return the name.

    Exact duplicates are kept, as there. Nothing is held out for tests, and for evaluations what `val_set_size` says.
    """
    plain = re.sub(r"[^A-Za-z0-9_]+", "_", name_of(path)).strip("_").lower()[:40] or "data"
    taken = {key.split(".")[1] for key in draft.settings if key.startswith("data.")}
    name = next(each for each in (plain, *(f"{plain}_{n}" for n in range(2, 1000))) if each not in taken)
    for key, value in {"path": path, **values}.items():
        draft.set(f"data.{name}.{key}", value, of=of)
    for key, value in (("eval_fraction", 0.0), ("test_fraction", 0.0), ("duplicates.exact", "keep")):
        draft.settings[f"data.{name}.{key}"] = value
    draft.groups["data"] = []
    return name


def name_of(path: str) -> str:
    """Return the name of a file without its suffixes, or the last part of a Hub id."""
    name = Path(path.rstrip("/")).name
    while any(name.endswith(suffix) for suffix in DATA_SUFFIXES):
        name = name[: name.rindex(".")]
    return name


def resolved(draft: Draft, path: str) -> str:
    """Return a local file from the other config's folder where it is not in this one."""
    if path.startswith(("~", "/")) or "://" in path or os.path.exists(path):
        return path
    beside = os.path.join(draft.folder, path)
    return beside if os.path.exists(beside) else path


def path_of(draft: Draft, entry: Mapping[str, Any], *, of: str) -> str | None:
    """Return the path of an entry of `path` and `data_files`; None, refused, of one that names no single place."""
    path = text_in(draft, entry, "path", of=of)
    if path is None:
        draft.refuse(of, "an entry has no path")
    elif entry.get("data_files"):
        path = of_hub_file(path, entry["data_files"])
        if path is None:
            draft.refuse(f"{of}.data_files", "a source here is one file, a folder or a pattern; write data.NAME.path")
    return None if path is None else resolved(draft, path)


def text_in(draft: Draft, entry: Mapping[str, Any], key: str, *, of: str) -> str | None:
    """Return a text of an entry; None of one that is not given, and of what is no text, which is refused."""
    value = entry.get(key)
    if value is not None and not isinstance(value, str):
        draft.refuse(f"{of}.{key}", "it is no text")
        return None
    return value or None


def of_hub_file(path: str, files: Any) -> str | None:
    """Return the address of the one file of a Hub data set that is named; None where there are several."""
    listed = files if isinstance(files, list) else [files]
    if len(listed) != 1 or not isinstance(listed[0], str):
        return None
    file = listed[0]
    is_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not file.startswith((path, "/")) and "://" not in file
    return f"hf://datasets/{path}/{file}" if is_hub else file


def names_of_sources(draft: Draft) -> list[str]:
    """Return the names of the sources that the draft has."""
    return list(dict.fromkeys(key.split(".")[1] for key in draft.settings if key.startswith("data.")))


def hold_out(draft: Draft, *, key: str) -> None:
    """Hold a share of every source out for evaluations."""
    share = draft.number(key)
    if not share:
        return
    if not 0 < share < 1:
        draft.refuse(key, "a number of rows is held out there; a share below 1 is here (data.NAME.eval_fraction)")
        return
    for name in names_of_sources(draft):
        draft.set(f"data.{name}.eval_fraction", share, of=key)
    draft.note(key, "held-out rows are chosen by a hash of their first question, not drawn")
