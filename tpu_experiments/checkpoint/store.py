"""Checkpoints of a run folder: safetensors and JSON, committed atomically.

`checkpoints/step_00000120/` holds `progress.json` and the safetensors files of each group of tensors, named as in
storage/tensors.py; `COMMIT.json`, with the size and SHA-256 of each, is written last. A folder without it, or whose
files differ from it, does not count. A save needs memory for the bytes of one file besides the tensors that it is
given. Several hosts that share a folder may each write files of one checkpoint; the first begins and commits it.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    foreign_file_error,
    read_manifest,
    steps_in,
    strict_object,
)
from tpu_experiments.checkpoint.reading import (
    Groups,
    content_of,
    forget,
    lazy_groups,
    read_groups,
    remember,
    require_size,
    verify,
    verify_with,
)
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.runtime.processes.hosts import Hosts
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.tensors import chunks_of, tensors_in, unequal

log = logging.getLogger(__name__)
Result = TypeVar("Result")
Restore = Callable[[dict[str, Any], Groups], Result]
"""Takes a checkpoint's progress and its tensors by group; its result is that of the read."""


class StorageError(RuntimeError):
    """A file that was read back differs from what was written."""


@dataclass
class Draft:
    """A checkpoint before its commit."""

    target: str
    step: int
    files: dict[str, FileFacts] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes written so far."""
        return sum(facts.num_bytes for facts in self.files.values())


def begin(folder: str, *, step: int, progress: Mapping[str, Any]) -> Draft:
    """Create a checkpoint folder with progress.json and no tensors; an earlier one of the step is removed."""
    target = paths.join(folder, folder_name(step))
    if paths.exists(target) or paths.is_link(target):
        # An earlier process did not commit it, or the run was rolled back and repeats it. The marker goes first.
        paths.remove_marked(target, COMMIT)
    forget(target)
    paths.make_dirs(target)
    draft = Draft(target, step)
    text = strict_json.dumps(dict(progress), indent=1).encode()
    _write(draft, PROGRESS, iter([memoryview(text)]))
    return draft


def begun(folder: str, *, step: int) -> Draft:
    """Return a draft for the files of this host, of a checkpoint that the first host has begun."""
    target = paths.join(folder, folder_name(step))
    forget(target)
    paths.make_dirs(target)
    return Draft(target, step)


def merge(draft: Draft, drafts: Iterable[Draft]) -> None:
    """Add the files of other hosts' drafts to that of the first, which must see them with their sizes.

    Raises:
        StorageError: a file is missing here or has another size, or two hosts wrote the same.
    """
    for other in drafts:
        twice = draft.files.keys() & other.files.keys()
        if twice:
            raise StorageError(f"{draft.target}: two hosts wrote {min(twice)}")
        for name, facts in other.files.items():
            try:
                require_size(draft.target, name, facts)
            except (FileNotFoundError, ValueError) as error:
                raise StorageError(
                    f"{draft.target}: {error}, as the first host sees it, though another has written it and read it "
                    "back: output_dir= must be a bucket or a folder that all hosts share"
                ) from error
        draft.files |= other.files


def add_tensors(draft: Draft, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of contiguous host tensors to the draft; `name` is that of `storage.tensors.file_name`."""
    _write(draft, name, chunks_of(tensors))


def read_back(draft: Draft, name: str) -> bytearray:
    """Read a file of the draft back from storage and verify it.

    The operating system's cached pages of a local file are dropped first.

    Raises:
        StorageError: it differs from what was written.
    """
    paths.forget_cached(paths.join(draft.target, name))
    try:
        return content_of(draft.target, name, draft.files[name])
    except (FileNotFoundError, ValueError) as error:
        raise StorageError(f"{draft.target}: {error}, right after it was written") from error


def read_tensors(draft: Draft, name: str, written: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read a file's tensors back from storage and compare them with those written.

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


def commit(draft: Draft, *, eval_loss: float | None = None, proof: dict[str, Any] | None = None) -> str:
    """Write the manifest and return its text: the checkpoint is complete from now on."""
    text = Manifest(draft.step, draft.files, eval_loss, proof).text()
    paths.write_text_atomic(paths.join(draft.target, COMMIT), text)
    if proof is not None:
        remember(draft.target, text)
    return text


def verify_newest(folder: str, hosts: Hosts, *, before: int | None = None) -> None:
    """Verify the newest complete checkpoint (of a step below `before`) with all hosts, each a part of its files.

    A collective; reads that follow on any host find it verified. A damaged one is logged, and the one before verified.

    Raises:
        ConfigError: this program cannot have written the newest one.
    """
    if hosts.size == 1:
        return
    for target in hosts.gather(_newest_first(folder, before=before))[0]:
        with _skip_incomplete(target):
            verify_with(hosts, target, read_manifest)
            return


def read_latest(
    folder: str,
    restore: Restore[Result],
    *,
    before: int | None = None,
    max_held_bytes: float = math.inf,
) -> Result | None:
    """Return `restore(progress, tensors by group)` of the newest complete checkpoint; None when there is none.

    The tensors of a checkpoint above `max_held_bytes` are read one by one, at access. A torn or altered checkpoint is
    logged and skipped for the previous one; `restore` is called again if that is found while it runs.

    Args:
        before: consider only checkpoints of steps below this.

    Raises:
        ConfigError: this program cannot have written the newest one.
    """
    for target in _newest_first(folder, before=before):
        with _skip_incomplete(target):
            manifest = read_manifest(target)
            progress = _progress(target, manifest)
            is_held = sum(facts.num_bytes for facts in manifest.files.values()) <= max_held_bytes
            return restore(progress, read_groups(target, manifest) if is_held else lazy_groups(target, manifest))
    return None


def read_step(folder: str, step: int, restore: Restore[Result], *, max_held_bytes: float = math.inf) -> Result:
    """Return `restore(progress, tensors by group)` of one step's checkpoint; arguments as for `read_latest`.

    Raises:
        FileNotFoundError: the checkpoint or one of its files is missing.
        ValueError: a file differs from COMMIT.json, or that is torn.
        ConfigError: this program cannot have written the checkpoint.
    """
    target = paths.join(folder, folder_name(step))
    manifest = read_manifest(target)
    is_held = sum(facts.num_bytes for facts in manifest.files.values()) <= max_held_bytes
    return restore(
        _progress(target, manifest), read_groups(target, manifest) if is_held else lazy_groups(target, manifest)
    )


def latest_progress(folder: str, *, before: int | None = None) -> tuple[int, dict[str, Any]] | None:
    """Return step and progress of the newest complete checkpoint; None when there is none.

    With `before`, only steps below it count. The checkpoint is verified file by file, once per process; after that only
    its manifest and progress.json are read.

    Raises:
        ConfigError: this program cannot have written the newest one.
    """
    for target in _newest_first(folder, before=before):
        with _skip_incomplete(target):
            manifest = read_manifest(target)
            verify(target, manifest)
            return manifest.step, _progress(target, manifest)
    return None


def latest_step(folder: str, *, before: int | None = None) -> int:
    """Return the step of the newest complete checkpoint of a step below `before`; 0 without one."""
    found = latest_progress(folder, before=before)
    return found[0] if found else 0


def remove_after(folder: str, step: int) -> None:
    """Remove the checkpoints of steps after `step`, for a run that is rolled back to it."""
    for later in steps_in(folder):
        if later > step:
            target = paths.join(folder, folder_name(later))
            paths.remove_marked(target, COMMIT)
            forget(target)


def _progress(target: str, manifest: Manifest) -> dict[str, Any]:
    """Read progress.json and check that its step, if it has one, is the manifest's."""
    place = paths.join(target, PROGRESS)
    progress = strict_object(content_of(target, PROGRESS, manifest.files[PROGRESS]), place=place)
    step = progress.get("step", manifest.step)
    if type(step) is not int or step != manifest.step:
        raise foreign_file_error(place, f"it says step={str(step)[:80]!r}, unlike its folder's name")
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
def _skip_incomplete(target: str) -> Iterator[None]:
    """Log and suppress the error of a checkpoint that a crash left incomplete; other errors pass."""
    try:
        yield
    except ConfigError:
        raise
    except (FileNotFoundError, IsADirectoryError, ValueError) as error:
        forget(target)
        log.warning("checkpoint %s is incomplete (%s): skipped", target, error)
