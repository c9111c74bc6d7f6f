"""Checkpoints of host tensors, written and read in one call each."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tpu_experiments.checkpoint.reading import Groups
from tpu_experiments.checkpoint.retention import Keep, Retention
from tpu_experiments.checkpoint.store import add_tensors, begin, commit, read_latest
from tpu_experiments.storage.tensors import file_name, shards


def save_checkpoint(
    folder: str,
    *,
    step: int,
    groups: Groups,
    progress: Mapping[str, Any],
    keep_last: int,
    max_bytes: float = math.inf,
) -> str:
    """Write one checkpoint of host tensors, then remove all but the newest `keep_last`; return its folder.

    Files have at most `max_bytes` of tensors (a larger tensor has a file of its own).
    """
    draft = begin(folder, step=step, progress=progress)
    for group, tensors in groups.items():
        files = shards({name: t.nbytes for name, t in tensors.items()}, max_bytes=max_bytes)
        for number, names in enumerate(files, start=1):
            add_tensors(draft, file_name(group, number, len(files)), {name: tensors[name] for name in names})
    commit(draft)
    Retention(folder).apply(newest=step, eval_loss=None, keep=Keep(keep_last))
    return draft.target


def load_latest(
    folder: str, *, before: int | None = None
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]] | None:
    """Return progress and all tensors of the newest complete checkpoint, in memory (see `read_latest`)."""

    def use(progress: dict[str, Any], groups: Groups) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        return progress, {group: dict(tensors) for group, tensors in groups.items()}

    return read_latest(folder, use, before=before)
