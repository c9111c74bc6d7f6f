"""Written epochs of a stage: the rows of all its sources in shuffled order, for sequential reading.

<prepared>/stage-<name>-<key>/epoch-000/00000.npy, … , manifest.json (written last). The training opens them with
`loader.order=written`, from a disk mounted read-only or from a bucket.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from tpu_experiments.config.curriculum import Stage
from tpu_experiments.config.data_schema import PrepareConfig
from tpu_experiments.data.prepared import MANIFEST, PreparedSource, read_manifest
from tpu_experiments.data.steps.keys import short_hash
from tpu_experiments.data.store.shards import RowStore, arrays_entry, damaged_shards, row_dtype
from tpu_experiments.data.store.shuffle import read_origins, write_epoch
from tpu_experiments.storage import paths
from tpu_experiments.storage.sealed import DamagedFile, require_sha256, write_sealed_json

log = logging.getLogger(__name__)

VERSION = 2
"""Incremented when the same rows are written in another order."""


@dataclass(frozen=True, eq=False)
class WrittenEpoch:
    """One epoch's N rows in order, with each row's index in the concatenated sources."""

    rows: RowStore
    origins_N: NDArray[np.int64]


def write_epochs(
    stage: Stage, *, sources: Mapping[str, PreparedSource], settings: PrepareConfig, seed: int, folder: str
) -> list[WrittenEpoch]:
    """Write the first `prepare.written_epochs` epochs of a stage, or reuse intact ones."""
    seq_len = stage.geometry.seq_len
    chosen = [sources[name] for name in stage.sources]
    arrays = chosen[0].arrays(seq_len)
    largest = max(source.max_token_id for source in chosen)
    facts = {
        "version": VERSION,
        "audits": [source.audit_hashes[f"{source.name}@{seq_len}"] for source in chosen],
        "seed": seed,
        "stage_index": stage.index,
        "passes": settings.shuffle_passes,
        "block_rows": settings.shuffle_block_rows,
        "max_token_id": largest,
        **arrays_entry(arrays),
    }
    base = paths.join(folder, f"stage-{stage.name}-{short_hash(facts)}")
    epochs = []
    numbers = range(settings.written_epochs)
    for epoch in tqdm(numbers, desc=f"{stage.name}: epochs", unit=" epochs", leave=False, disable=None):
        target = paths.join(base, f"epoch-{epoch:03d}")
        expected = {**facts, "epoch": epoch, "seq_len": seq_len}
        manifest = read_manifest(target, expected=expected)
        if manifest is None or not _is_whole(manifest, folder=target):
            shards = write_epoch(
                [source.store("train", seq_len) for source in chosen],
                folder=target,
                seed=seed,
                stage_index=stage.index,
                epoch=epoch,
                passes=settings.shuffle_passes,
                block_rows=settings.shuffle_block_rows,
                rows_per_shard=settings.shuffle_block_rows,
                dtype=row_dtype(seq_len, vocab_size=largest + 1, arrays=arrays),
            )
            manifest = {**expected, "shards": shards}
            write_sealed_json(paths.join(target, MANIFEST), manifest, indent=1)
        epochs.append(_opened(target, manifest, like=chosen[0]))
    return epochs


def _is_whole(manifest: Mapping[str, Any], *, folder: str) -> bool:
    """Return whether shards and origins match the manifest's checksums; damage is logged."""
    damaged = damaged_shards(folder, manifest["shards"], md5={s["name"]: s["md5"] for s in manifest["shards"]})
    for shard in manifest["shards"]:
        path = paths.join(folder, shard["origins"])
        try:
            require_sha256(paths.read_bytes(path), shard["origins_sha256"], path=path)
        except FileNotFoundError:
            damaged.append(f"{path}; the file is missing.")
        except DamagedFile as error:
            damaged.append(str(error))
    for complaint in damaged:
        log.warning("%s The epoch is written again.", complaint)
    return not damaged


def _opened(folder: str, manifest: Mapping[str, Any], *, like: PreparedSource) -> WrittenEpoch:
    seq_len = manifest["seq_len"]
    shards, pad = manifest["shards"], like.manifests[seq_len]["pad_id"]
    store = RowStore.of_records(folder, shards, seq_len=seq_len, pad_id=pad, cache=like.cache)
    return WrittenEpoch(store, read_origins(folder, shards=shards))
