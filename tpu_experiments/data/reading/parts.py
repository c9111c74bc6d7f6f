"""Parts of a source: rows that the split hash divides, and files or Hub splits of one split.

A user's own evaluation and test data is named by `eval_path`, `test_path`, `eval_split` and `test_split`, or by the
names of files in a folder, as with Hugging Face's `load_dataset(folder)`: train.jsonl, test-00000-of-00002.parquet,
validation/a.csv.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from tpu_experiments.config.data_schema import OWN_KEYS
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.data.documents import SourceSpec
from tpu_experiments.data.reading.locations import SourceFile, list_files
from tpu_experiments.storage import paths
from tpu_experiments.storage.paths import is_remote

SPLIT_OF_WORD = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation"), "evaluation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
NAMES_SHOWN = 5


@dataclass(frozen=True)
class Part:
    """Rows of a source that are read sequentially."""

    split: str | None
    """The split that all of them belong to; None where the split hash decides."""
    spec: SourceSpec
    files: list[SourceFile]
    """Empty for a split of the Hub, and with a reader of the user's own."""


@dataclass(frozen=True)
class Parts:
    """All parts of a source, that of `path` first, and the origins of splits not decided by the hash."""

    parts: list[Part]
    origins: dict[str, str]

    @property
    def own(self) -> frozenset[str]:
        """Splits that have files of their own."""
        return frozenset(part.split for part in self.parts if part.split is not None)

    @property
    def files(self) -> list[SourceFile]:
        """Files of all parts."""
        return [file for part in self.parts for file in part.files]


def list_parts(spec: SourceSpec, *, has_reader: bool = False) -> Parts:
    """Return the parts of a source; with a reader of the user's own they have no files.

    Raises:
        ConfigError: nothing is found, or nothing is left to train on; see `list_files`.
    """
    main = [] if has_reader else list_files(spec)
    own = [
        part
        for split, (path_key, split_key) in OWN_KEYS.items()
        if (part := _named_part(spec, split, path_key, split_key, is_local=bool(main), has_reader=has_reader))
    ]
    taken = {_place(file) for part in own for file in part.files}
    left = [file for file in main if _place(file) not in taken]
    if main and not left:
        raise ConfigError(
            f"{spec.key}; all of its {len(main)} files are also those of eval_path or test_path, so that nothing is "
            "left to train on; name other files."
        )
    train, named, unused = _by_name(left, spec=spec, given={part.split for part in own})
    parts = [Part(None, spec, train), *own]
    parts += [Part(split, spec, files) for split, files in named.items()]
    return Parts(parts, _origins(parts, named=named, unused=unused, spec=spec))


def _named_part(
    spec: SourceSpec, split: str, path_key: str, split_key: str, *, is_local: bool, has_reader: bool
) -> Part | None:
    """Return the part that the split's config keys name; None where neither is set."""
    path, hub_split = getattr(spec, path_key), getattr(spec, split_key)
    if path is not None:
        own = replace(spec, path=str(paths.find_local(path) or path), path_key=path_key)
        files = [] if has_reader else list_files(own)
        if not files and not has_reader:
            raise ConfigError(
                f"{own.key}; there is no such file or folder; point it at one, or name a split of the Hub's data set "
                f"with data.{spec.name}.{split_key}=."
            )
        return Part(split, own, [replace(file, name=f"{path_key}/{file.name}", split=split) for file in files])
    if hub_split is None:
        return None
    if is_local:
        raise ConfigError(
            f"data.{spec.name}.{split_key}={hub_split}; it names a split on the Hub, and data.{spec.name}.path="
            f"{spec.path} is a file or folder; set data.{spec.name}.{path_key}= to files of that split."
        )
    return Part(split, replace(spec, hub_split=hub_split), [])


def _place(file: SourceFile) -> str:
    return file.url if is_remote(file.url) else str(Path(file.url).resolve())


def split_in_name(name: str) -> str | None:
    """Return the split that a file, or else its nearest parent folder so named, is named after.

    >>> [split_in_name(n) for n in ("train-00000-of-00005.parquet", "dev/a.jsonl", "latest.jsonl", "x/test_sft.csv.gz")]
    ['train', 'evaluation', None, 'test']
    """
    for part in reversed(PurePosixPath(name).parts):
        found = [SPLIT_OF_WORD[word] for word in re.split(r"[-._ 0-9]+", part.lower()) if word in SPLIT_OF_WORD]
        if found:
            return found[0]
    return None


def _by_name(
    files: Sequence[SourceFile], *, spec: SourceSpec, given: set[str | None]
) -> tuple[list[SourceFile], dict[str, list[SourceFile]], list[SourceFile]]:
    """Divide files by their names into training files, held-out files by split, and unused ones.

    Unused are files named after a split that a config key sets otherwise.
    """
    if not files or spec.named_splits == "ignore" or _names_one_file(spec, files):
        return list(files), {}, []
    train = [file for file in files if split_in_name(file.name) in (None, "train")]
    held_out = {split: [f for f in files if split_in_name(f.name) == split] for split in OWN_KEYS}
    if not train:
        raise ConfigError(
            f"{spec.key}; every file there is named as one of evaluation or test ({_listed(files)}), so that nothing "
            f"is left to train on; point data.{spec.name}.path= at the training files and data.{spec.name}.eval_path= "
            f"and test_path= at these, or take all of them to train on and to hold out of by a hash: "
            f"data.{spec.name}.named_splits=ignore."
        )
    named = {
        split: [replace(file, split=split) for file in found]
        for split, found in held_out.items()
        if found and split not in given
    }
    return train, named, [file for split in held_out if split in given for file in held_out[split]]


def _names_one_file(spec: SourceSpec, files: Sequence[SourceFile]) -> bool:
    """Return whether `path` names a single file, not a folder or pattern; its name then decides nothing."""
    return len(files) == 1 and PurePosixPath(spec.path).name == files[0].name


def _origins(
    parts: Sequence[Part], *, named: dict[str, list[SourceFile]], unused: Sequence[SourceFile], spec: SourceSpec
) -> dict[str, str]:
    """Describe each split's origin.

    Empty where the hash divides all rows and no file name suggests a split.
    """
    main = parts[0]
    mixed = [file for file in main.files if split_in_name(file.name) in OWN_KEYS]
    if mixed and not _names_one_file(spec, main.files):
        return {"train": f"named_splits=ignore: {_listed(mixed)} divided by the hash like all other files"}
    if len(parts) == 1:
        return {}
    origins = {}
    for part in parts[1:]:
        assert part.split is not None
        path_key, split_key = OWN_KEYS[part.split]
        if part.split in named:
            origins[part.split] = f"{_listed(part.files)}, by name"
        elif part.spec.path_key == path_key:
            origins[part.split] = f"{path_key}={paths.shown_path(part.spec.path)}"
        else:
            origins[part.split] = f"{split_key}={part.spec.hub_split}"
    rest = {"evaluation": "by hash, eval_fraction of the other files", "test": "none, since no test_path is given"}
    origins |= {split: words for split, words in rest.items() if split not in origins}
    is_all = "evaluation" in {part.split for part in parts}
    files = f": {_listed(main.files)}" if named else ""
    origins["train"] = ("all of path" if is_all else "the rest of path") + files
    if unused:
        origins["left out"] = f"{_listed(unused)}, named as a split that comes from a key"
    return {key: origins[key] for key in ("train", "evaluation", "test", "left out") if key in origins}


def _listed(files: Sequence[SourceFile]) -> str:
    more = f" and {len(files) - NAMES_SHOWN} more" if len(files) > NAMES_SHOWN else ""
    return ", ".join(file.name for file in files[:NAMES_SHOWN]) + more
