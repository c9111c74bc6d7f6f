"""Leakage between sources: documents that one holds out and another trains on.

Compared by the hashes that decide splits, which have no salt and so agree between sources.

<rows folder>/groups/train.npy, evaluation.npy, test.npy   the hashes of a split's documents, each once
"""

import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpu_experiments.config.data_schema import DataSourceConfig
from tpu_experiments.data.cleaning.split import SPLITS
from tpu_experiments.data.prepared import PreparedSource
from tpu_experiments.data.steps.selection import Selection
from tpu_experiments.data.store.shards import ShardRecord, record_of
from tpu_experiments.storage import paths
from tpu_experiments.storage.sealed import require_sha256


def write_groups(folder: str, selection: Selection) -> dict[str, ShardRecord]:
    """Write the hashes of every split; return each file's manifest record, by split."""
    records = {}
    paths.make_dirs(paths.join(folder, "groups"))
    for split in SPLITS:
        groups = np.unique(selection.groups_D[selection.chosen(split)])
        buffer = io.BytesIO()
        np.save(buffer, groups)
        data, name = buffer.getvalue(), f"groups/{split}.npy"
        paths.write_bytes_atomic(paths.join(folder, name), data)
        records[split] = record_of(name, data, rows=len(groups))
    return records


def add_overlaps_across_sources(
    prepared: Mapping[str, PreparedSource], *, sources: Mapping[str, DataSourceConfig]
) -> None:
    """Add `across` to the manifests of sources whose held-out documents another source trains on.

    Sources of equal fractions hold out the same hashes. So only pairs of unequal fractions are read, and pairs in which
    more than the hash decides: evaluation or test files of their own, or near copies kept in one split.

    Raises:
        DamagedFile: a source's hash file is missing or fails its checksum.
    """
    for name, source in prepared.items():
        found = [shared for other in prepared for shared in _shared(name, other, prepared=prepared, sources=sources)]
        for manifest in source.manifests.values():
            manifest["across"] = found


def _shared(
    name: str, other: str, *, prepared: Mapping[str, PreparedSource], sources: Mapping[str, DataSourceConfig]
) -> Iterator[dict[str, Any]]:
    """Yield a record for each split of `name` that shares documents with the training split of `other`."""
    own, theirs = sources[name], sources[other]
    is_alike = (own.kind, own.split_by) == (theirs.kind, theirs.split_by)
    is_own = any(_own_splits(prepared[source]) for source in (name, other))
    is_joined = "keep" in (own.duplicates.near_copies, theirs.duplicates.near_copies)
    if name == other or not is_alike or (_fractions(own) == _fractions(theirs) and not is_own and not is_joined):
        return
    trained = _read(prepared[other], "train")
    for split in SPLITS[1:]:
        count = len(np.intersect1d(_read(prepared[name], split), trained, assume_unique=True))
        if count:
            fractions = {name: _fractions(own), other: _fractions(theirs)}
            shared = {"split": split, "trained_by": other, "groups": count, "fractions": fractions}
            yield shared | ({"is_own": True} if is_own else {"is_joined": True} if is_joined else {})


def _own_splits(source: PreparedSource) -> list[str]:
    found: list[str] = next(iter(source.manifests.values()))["config"].get("own_splits", [])
    return found


def _fractions(source: DataSourceConfig) -> list[float]:
    return [source.eval_fraction, source.test_fraction]


def _read(source: PreparedSource, split: str) -> NDArray[np.uint64]:
    length, folder = next(iter(source.folders.items()))  # the same documents at every length
    record = source.manifests[length]["groups"][split]
    place = paths.join(folder, record["name"])
    content = paths.read_bytes(place)
    require_sha256(content, record["sha256"], path=place)
    found: NDArray[np.uint64] = np.load(io.BytesIO(content))
    return found
