"""Checkpoints of a run folder: safetensors and JSON, complete or invisible.

`checkpoints/step_00000120/` holds the safetensors files of each group of tensors (shards.py) and `progress.json`;
`COMMIT.json`, with the size and SHA-256 of each, is written last. A folder without it, or whose files differ from it,
does not count. In memory a save holds one file's bytes beside the tensors that it is given.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from tpu_experiments.checkpoint.manifest import (
    COMMIT,
    PROGRESS,
    FileFacts,
    Manifest,
    folder_name,
    hostile,
    read_manifest,
    steps_in,
    strict_object,
)
from tpu_experiments.checkpoint.reading import Groups, content_of, forget, held_groups, located_groups, remember, verify
from tpu_experiments.checkpoint.retention import Keep, Retention
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.io import paths, strict_json
from tpu_experiments.io.shards import file_name, shards
from tpu_experiments.io.tensor_file import chunks_of, tensors_in, unequal

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class StorageError(RuntimeError):
    """What was read back is not what was written."""


@dataclass
class Draft:
    """A checkpoint that does not count yet."""

    target: str
    step: int
    files: dict[str, FileFacts] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes written so far."""
        return sum(facts.num_bytes for facts in self.files.values())


def begin(folder: str, *, step: int, progress: Mapping[str, Any]) -> Draft:
    """An empty checkpoint folder with what is no tensor."""
    target = paths.join(folder, folder_name(step))
    if paths.exists(target) or paths.is_link(target):
        # An earlier life wrote it without a commit, or it is being repeated from before it. The marker goes first.
        paths.remove_marked(target, COMMIT)
    forget(target)
    paths.make_dirs(target)
    draft = Draft(target, step)
    text = strict_json.dumps(dict(progress), indent=1).encode()
    _write(draft, PROGRESS, iter([memoryview(text)]))
    return draft


def add_tensors(draft: Draft, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of contiguous host tensors; for its name see shards.py."""
    _write(draft, name, chunks_of(tensors))


def read_back(draft: Draft, name: str) -> bytearray:
    """A file of the draft as storage gives it back.

    Raises:
        StorageError: it differs from what was written.
    """
    paths.forget_cached(paths.join(draft.target, name))
    try:
        return content_of(draft.target, name, draft.files[name])
    except (FileNotFoundError, ValueError) as error:
        raise StorageError(f"{draft.target}: {error}, right after it was written") from error


def read_tensors(draft: Draft, name: str, written: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A file's tensors as storage gives them back.

    Raises:
        StorageError: bytes, names, shapes, types or values differ from what was written.
    """
    content = read_back(draft, name)
    try:
        found = tensors_in(content)
    except ValueError as error:
        raise StorageError(f"{paths.join(draft.target, name)} cannot be read back: {error}") from error
    complaint = unequal(found, written)
    if complaint is not None:
        raise StorageError(f"{paths.join(draft.target, name)}, read back, {complaint}")
    return found


def commit(draft: Draft, *, eval_loss: float | None = None, proof: dict[str, Any] | None = None) -> None:
    """Have the checkpoint count from now on."""
    text = Manifest(draft.step, draft.files, eval_loss, proof).text()
    paths.write_text_atomic(paths.join(draft.target, COMMIT), text)
    if proof is not None:
        remember(draft.target, text)


def save_checkpoint(
    folder: str,
    *,
    step: int,
    groups: Groups,
    progress: Mapping[str, Any],
    keep_last: int,
    max_bytes: float = math.inf,
) -> str:
    """Write one checkpoint of host tensors in files of at most `max_bytes`, then remove all but the newest `keep_last`;
    returns its folder."""
    draft = begin(folder, step=step, progress=progress)
    for group, tensors in groups.items():
        files = shards({name: t.nbytes for name, t in tensors.items()}, max_bytes=max_bytes)
        for number, names in enumerate(files, start=1):
            add_tensors(draft, file_name(group, number, len(files)), {name: tensors[name] for name in names})
    commit(draft)
    Retention(folder).apply(newest=step, eval_loss=None, keep=Keep(keep_last))
    return draft.target


def read_latest(
    folder: str,
    use: Callable[[dict[str, Any], Groups], Result],
    *,
    before: int | None = None,
    max_held_bytes: float = math.inf,
) -> Result | None:
    """What `use(progress, tensors by group)` makes of the newest complete checkpoint (of a step below `before`); None
    when there is none.

    The tensors of a checkpoint above `max_held_bytes` are read one by one, as they are asked for. A torn or altered
    checkpoint is named in the log and passed over for the one before: `use` is called again where one proves altered
    inside it.

    Raises:
        ConfigError: the newest one was not written by this program.
    """
    for target in _newest_first(folder, before=before):
        with _passing_over(target):
            manifest = read_manifest(target)
            progress = _progress(target, manifest)
            is_held = sum(facts.num_bytes for facts in manifest.files.values()) <= max_held_bytes
            return use(progress, held_groups(target, manifest) if is_held else located_groups(target, manifest))
    return None


def read_step(
    folder: str, step: int, use: Callable[[dict[str, Any], Groups], Result], *, max_held_bytes: float = math.inf
) -> Result:
    """What `use(progress, tensors by group)` makes of the checkpoint of one step; arguments as of `read_latest`.

    Raises:
        FileNotFoundError: there is none, or one of its files is missing.
        ValueError: it differs from its marker.
        ConfigError: it was not written by this program.
    """
    target = paths.join(folder, folder_name(step))
    manifest = read_manifest(target)
    is_held = sum(facts.num_bytes for facts in manifest.files.values()) <= max_held_bytes
    return use(
        _progress(target, manifest), held_groups(target, manifest) if is_held else located_groups(target, manifest)
    )


def load_latest(
    folder: str, *, before: int | None = None
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]] | None:
    """As `read_latest`: progress and all tensors, in memory."""

    def use(progress: dict[str, Any], groups: Groups) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        return progress, {group: dict(tensors) for group, tensors in groups.items()}

    return read_latest(folder, use, before=before)


def latest_progress(folder: str, *, before: int | None = None) -> tuple[int, dict[str, Any]] | None:
    """Step and progress of the newest complete checkpoint (of a step below `before`), verified one file at a time.

    None when there is none. A checkpoint is read whole once in a process; after that only its manifest and its
    progress are.

    Raises:
        ConfigError: the newest one was not written by this program.
    """
    for target in _newest_first(folder, before=before):
        with _passing_over(target):
            manifest = read_manifest(target)
            verify(target, manifest)
            return manifest.step, _progress(target, manifest)
    return None


def latest_step(folder: str, *, before: int | None = None) -> int:
    """Step of the newest complete checkpoint (of a step below `before`); 0 when there is none."""
    found = latest_progress(folder, before=before)
    return found[0] if found else 0


def remove_after(folder: str, step: int) -> None:
    """Remove the checkpoints of later steps: the run goes back to `step` and on in another way."""
    for later in steps_in(folder):
        if later > step:
            target = paths.join(folder, folder_name(later))
            paths.remove_marked(target, COMMIT)
            forget(target)


def _progress(target: str, manifest: Manifest) -> dict[str, Any]:
    """The content of progress.json; where it has a step, that of its checkpoint."""
    place = paths.join(target, PROGRESS)
    progress = strict_object(content_of(target, PROGRESS, manifest.files[PROGRESS]), place=place)
    step = progress.get("step", manifest.step)
    if type(step) is not int or step != manifest.step:
        raise hostile(place, f"it says step={str(step)[:80]!r}, unlike its folder's name")
    return progress


def _write(draft: Draft, name: str, chunks: Iterator[memoryview]) -> None:
    digest, num_bytes = hashlib.sha256(), 0

    def counted() -> Iterator[memoryview]:
        nonlocal num_bytes
        for chunk in chunks:
            digest.update(chunk)
            num_bytes += len(chunk)
            yield chunk

    paths.write_chunks_atomic(paths.join(draft.target, name), counted())
    draft.files[name] = FileFacts(num_bytes, digest.hexdigest())


def _newest_first(folder: str, *, before: int | None = None) -> list[str]:
    steps = [step for step in steps_in(folder) if before is None or step < before]
    return [paths.join(folder, folder_name(step)) for step in reversed(steps)]


@contextmanager
def _passing_over(target: str) -> Iterator[None]:
    """A checkpoint that a crash left incomplete is named in the log, and what follows takes the next one."""
    try:
        yield
    except ConfigError:
        raise
    except (FileNotFoundError, IsADirectoryError, ValueError) as error:
        forget(target)
        log.warning("%s is incomplete (%s); passing over it", target, error)
