"""Checkpoints of a run folder: safetensors and JSON, complete or invisible.

`checkpoints/step_00000120/` holds one safetensors file per group of tensors and `progress.json`; `COMMIT.json`, with
the size and SHA-256 of each, is written last. A folder without it, or whose files differ from it, does not count.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from tpu_experiments.io import paths

log = logging.getLogger(__name__)
COMMIT, PROGRESS = "COMMIT.json", "progress.json"


def save_checkpoint(
    folder: str, *, step: int, groups: Mapping[str, Mapping[str, Tensor]], progress: Mapping[str, Any], keep_last: int
) -> str:
    """Write one checkpoint of host tensors, then remove all but the newest `keep_last`; returns its folder."""
    target = paths.join(folder, f"step_{step:08d}")
    if paths.exists(target):
        paths.remove_tree(target)  # an earlier life wrote it without a commit, or is being repeated from before it
    paths.make_dirs(target)
    commit = {PROGRESS: _write(target, PROGRESS, json.dumps(dict(progress), indent=1).encode())}
    for name, tensors in groups.items():
        file = f"{name}.safetensors"
        commit[file] = _write(target, file, save(dict(tensors)))
    paths.write_text_atomic(paths.join(target, COMMIT), json.dumps({"step": step, "files": commit}, indent=1))
    names = _steps(folder)
    # What has a later step is damaged, or this run would have gone on from it: it must not count as the newest.
    kept = [name for name in names if name <= f"step_{step:08d}"][-keep_last:]
    for name in names:
        if name not in kept:
            paths.remove_tree(paths.join(folder, name))
    return target


def load_latest(folder: str) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]] | None:
    """Progress and tensors of the newest complete checkpoint; None when there is none.

    A torn or altered checkpoint is named in the log and passed over for the one before.
    """
    found = _newest(folder, read=lambda name, content: json.loads(content) if name == PROGRESS else load(content))
    if found is None:
        return None
    progress = found[1].pop(PROGRESS)
    return progress, {file.removesuffix(".safetensors"): tensors for file, tensors in found[1].items()}


def latest_progress(folder: str) -> tuple[int, dict[str, Any]] | None:
    """Step and progress of the newest complete checkpoint, verified one file at a time; None when there is none."""
    found = _newest(folder, read=lambda name, content: json.loads(content) if name == PROGRESS else None)
    return (found[0], found[1][PROGRESS]) if found else None


def latest_step(folder: str) -> int:
    """Step of the newest complete checkpoint; 0 when there is none."""
    found = latest_progress(folder)
    return found[0] if found else 0


def _write(target: str, name: str, content: bytes) -> dict[str, Any]:
    paths.write_bytes_atomic(paths.join(target, name), content)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _steps(folder: str) -> list[str]:
    return [name for name in paths.list_names(folder) if name.startswith("step_")]


def _newest(folder: str, *, read: Callable[[str, bytes], Any]) -> tuple[int, dict[str, Any]] | None:
    """Step of the newest complete checkpoint, and what `read` makes of each of its files."""
    for name in reversed(_steps(folder)):
        target = paths.join(folder, name)
        try:
            return int(name.removeprefix("step_")), _verified(target, read=read)
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is incomplete (%s); passing over it", target, error)
    return None


def _verified(target: str, *, read: Callable[[str, bytes], Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, facts in json.loads(paths.read_text(paths.join(target, COMMIT)))["files"].items():
        content = paths.read_bytes(paths.join(target, name))
        if hashlib.sha256(content).hexdigest() != facts["sha256"]:
            raise ValueError(f"{name} differs from its commit record")
        made[name] = read(name, content)
    return made
