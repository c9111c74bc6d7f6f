"""The written epochs of a stage: all its sources' rows in shuffled order, one folder an epoch, for reading in a row.

<prepared>/stage-<name>-<key>/epoch-000/00000.npy, … , manifest.json (written last). The training opens them with
`loader.order=written`, from a disk mounted read-only or from a bucket.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from tpu_experiments.config.curriculum import Stage
from tpu_experiments.config.preparing import PrepareConfig
from tpu_experiments.data.prepared import MANIFEST, PreparedSource, read_manifest
from tpu_experiments.data.steps.keys import short_hash
from tpu_experiments.data.store.shards import RowStore, row_dtype
from tpu_experiments.data.store.shuffle import read_origins, write_epoch
from tpu_experiments.io import paths

VERSION = 1
"""Goes up when the same rows are written in another order."""


@dataclass(frozen=True, eq=False)
class WrittenEpoch:
    """One epoch's N rows in their order, and each row's place in the stage's sources one after the other."""

    rows: RowStore
    origins_N: NDArray[np.int64]


def write_epochs(
    stage: Stage, *, sources: Mapping[str, PreparedSource], settings: PrepareConfig, seed: int, folder: str
) -> list[WrittenEpoch]:
    """The first `prepare.written_epochs` epochs of a stage, made now or found as they are."""
    seq_len = stage.geometry.seq_len
    chosen = [sources[name] for name in stage.sources]
    largest = max(source.max_token_id for source in chosen)
    facts = {
        "version": VERSION,
        "audits": [source.audit_hashes[f"{source.name}@{seq_len}"] for source in chosen],
        "seed": seed,
        "stage_index": stage.index,
        "passes": settings.shuffle_passes,
        "block_rows": settings.shuffle_block_rows,
        "max_token_id": largest,
    }
    base = paths.join(folder, f"stage-{stage.name}-{short_hash(facts)}")
    epochs = []
    numbers = range(settings.written_epochs)
    for epoch in tqdm(numbers, desc=f"{stage.name}: epochs", unit=" epochs", leave=False, disable=None):
        target = paths.join(base, f"epoch-{epoch:03d}")
        manifest = read_manifest(target)
        if manifest is None:
            shards = write_epoch(
                [source.store("train", seq_len) for source in chosen],
                folder=target,
                seed=seed,
                stage_index=stage.index,
                epoch=epoch,
                passes=settings.shuffle_passes,
                block_rows=settings.shuffle_block_rows,
                rows_per_shard=settings.shuffle_block_rows,
                dtype=row_dtype(seq_len, vocab_size=largest + 1),
            )
            manifest = {**facts, "seq_len": seq_len, "shards": shards}
            paths.write_text_atomic(paths.join(target, MANIFEST), json.dumps(manifest, indent=1))
        epochs.append(_opened(target, manifest, like=chosen[0]))
    return epochs


def _opened(folder: str, manifest: Mapping[str, Any], *, like: PreparedSource) -> WrittenEpoch:
    seq_len = manifest["seq_len"]
    shards, pad = manifest["shards"], like.manifests[seq_len]["pad_id"]
    store = RowStore.of_records(folder, shards, seq_len=seq_len, pad_id=pad, cache=like.cache)
    return WrittenEpoch(store, read_origins(folder, shards=shards))
