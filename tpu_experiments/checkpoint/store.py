"""Checkpoints of a run folder: safetensors and JSON, complete or invisible.

`checkpoints/step_00000120/` holds one safetensors file per group of tensors and `progress.json`; `COMMIT.json`, with
the size and SHA-256 of each, is written last. A folder without it, or whose files differ from it, does not count.
In memory a save holds one group's bytes beside the tensors that it is given, and so does reading.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

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
from tpu_experiments.checkpoint.retention import Keep, Retention
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.io import paths, strict_json
from tpu_experiments.io.ranges import read_range, size_of
from tpu_experiments.io.tensor_file import chunks_of, tensors_in, unequal

log = logging.getLogger(__name__)
SUFFIX = ".safetensors"
PIECE_BYTES = 64 * 2**20
Groups = Mapping[str, Mapping[str, Tensor]]
_verified: dict[str, str] = {}
"""Checkpoint folders that this process has read whole, or written and read back, to the SHA-256 of their manifest."""


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
    if paths.exists(target):
        # An earlier life wrote it without a commit, or it is being repeated from before it. The marker goes first.
        paths.remove_tree(paths.join(target, COMMIT))
        paths.remove_tree(target)
    _verified.pop(target, None)
    paths.make_dirs(target)
    draft = Draft(target, step)
    text = strict_json.dumps(dict(progress), indent=1).encode()
    _write(draft, PROGRESS, iter([memoryview(text)]))
    return draft


def add_group(draft: Draft, group: str, tensors: Mapping[str, Tensor]) -> None:
    """Write the file of one group of contiguous host tensors."""
    _write(draft, group + SUFFIX, chunks_of(tensors))


def read_back(draft: Draft, name: str) -> bytearray:
    """A file of the draft as storage gives it back.

    Raises:
        StorageError: it differs from what was written.
    """
    paths.forget_cached(paths.join(draft.target, name))
    try:
        return _content(draft.target, name, draft.files[name])
    except (FileNotFoundError, ValueError) as error:
        raise StorageError(f"{draft.target}: {error}, right after it was written") from error


def read_group(draft: Draft, group: str, written: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A group's tensors as storage gives them back.

    Raises:
        StorageError: bytes, names, shapes, types or values differ from what was written.
    """
    name = group + SUFFIX
    content = read_back(draft, name)
    try:
        found = tensors_in(content)
    except ValueError as error:
        raise StorageError(f"{paths.join(draft.target, name)} cannot be read back: {error}") from error
    complaint = unequal(found, written)
    if complaint is not None:
        raise StorageError(f"{paths.join(draft.target, name)}, read back, {complaint}")
    return found


def group_of(target: str, group: str) -> dict[str, Tensor]:
    """The tensors of one group of a checkpoint folder, complete or not, without a look at its manifest."""
    place = paths.join(target, group + SUFFIX)
    return tensors_in(_read(place, num_bytes=_size(place)))


def commit(draft: Draft, *, eval_loss: float | None = None, proof: dict[str, Any] | None = None) -> None:
    """Have the checkpoint count from now on."""
    text = Manifest(draft.step, draft.files, eval_loss, proof).text()
    paths.write_text_atomic(paths.join(draft.target, COMMIT), text)
    if proof is not None:
        _verified[draft.target] = _digest(text.encode())


def save_checkpoint(folder: str, *, step: int, groups: Groups, progress: Mapping[str, Any], keep_last: int) -> str:
    """Write one checkpoint of host tensors, then remove all but the newest `keep_last`; returns its folder."""
    draft = begin(folder, step=step, progress=progress)
    for name, tensors in groups.items():
        add_group(draft, name, tensors)
    commit(draft)
    Retention(folder).apply(newest=step, eval_loss=None, keep=Keep(keep_last))
    return draft.target


def load_latest(
    folder: str, *, before: int | None = None
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]] | None:
    """Progress and tensors of the newest complete checkpoint (of a step below `before`); None when there is none.

    A torn or altered checkpoint is named in the log and passed over for the one before.

    Raises:
        ConfigError: the newest one was not written by this program.
    """
    for target in _newest_first(folder, before=before):
        with _passing_over(target):
            contents = {name: _content(target, name, facts) for name, facts in read_manifest(target).files.items()}
            progress = strict_object(contents.pop(PROGRESS), place=paths.join(target, PROGRESS))
            groups = {}
            for name in list(contents):
                groups[name.removesuffix(SUFFIX)] = _tensors(contents.pop(name), place=paths.join(target, name))
            return progress, groups
    return None


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
            content = _content(target, PROGRESS, manifest.files[PROGRESS])
            return manifest.step, strict_object(content, place=paths.join(target, PROGRESS))
    return None


def latest_step(folder: str, *, before: int | None = None) -> int:
    """Step of the newest complete checkpoint (of a step below `before`); 0 when there is none."""
    found = latest_progress(folder, before=before)
    return found[0] if found else 0


def verify(target: str, manifest: Manifest) -> None:
    """Look at all files of a checkpoint, their sizes first; once in a process.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file differs from the manifest.
    """
    digest = _digest(manifest.text().encode())
    if _verified.get(target) == digest:
        return
    for name, facts in manifest.files.items():
        _require_size(target, name, facts)
    for name, facts in manifest.files.items():
        _content(target, name, facts)
    _verified[target] = digest


def remove_after(folder: str, step: int) -> None:
    """Remove the checkpoints of later steps: the run goes back to `step` and on in another way."""
    for later in steps_in(folder):
        if later > step:
            target = paths.join(folder, folder_name(later))
            paths.remove_tree(paths.join(target, COMMIT))
            paths.remove_tree(target)
            _verified.pop(target, None)


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
    except (FileNotFoundError, ValueError) as error:
        log.warning("%s is incomplete (%s); passing over it", target, error)


def _content(target: str, name: str, facts: FileFacts) -> bytearray:
    """A file's bytes, which are those that the manifest tells of."""
    _require_size(target, name, facts)
    content = _read(paths.join(target, name), num_bytes=facts.num_bytes)
    if _digest(content) != facts.sha256:
        raise ValueError(f"{name} differs from its commit record: another SHA-256")
    return content


def _require_size(target: str, name: str, facts: FileFacts) -> None:
    size = _size(paths.join(target, name))
    if size != facts.num_bytes:
        raise ValueError(f"{name} differs from its commit record: {size:,} bytes, not {facts.num_bytes:,}")


def _size(place: str) -> int:
    size = size_of(place)
    if size is None:
        raise FileNotFoundError(f"{place} is missing")
    return size


def _read(place: str, *, num_bytes: int) -> bytearray:
    """The file in memory once, whatever it takes to bring it there."""
    content = bytearray(num_bytes)
    for start in range(0, num_bytes, PIECE_BYTES):
        stop = min(start + PIECE_BYTES, num_bytes)
        content[start:stop] = read_range(place, start, stop)
    return content


def _tensors(content: bytearray, *, place: str) -> dict[str, Tensor]:
    try:
        return tensors_in(content)
    except ValueError as error:
        raise hostile(place, str(error)) from error


def _digest(content: bytes | bytearray) -> str:
    return hashlib.sha256(content).hexdigest()
