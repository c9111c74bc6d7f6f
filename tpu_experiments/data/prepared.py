"""Prepared data as the training reads it: a manifest and shards of rows for every source and row length.

<folder>/<source>-rows-<length>-<key>/manifest.json   numbers, hashes and names of the shards; written last
                                      train/00000.npy, evaluation/…, test/…
                                      reported.jsonl  every row that is not in the data: reason, place, message
"""

import json
from dataclasses import dataclass, field
from typing import Any

from tpu_experiments.data.store.shards import RowStore
from tpu_experiments.data.store.stream import CacheSettings
from tpu_experiments.io import paths

MANIFEST = "manifest.json"


class NotPrepared(Exception):
    """A source has no prepared rows, and none were to be made."""


@dataclass(frozen=True)
class PreparedSource:
    """One source's rows by their length; picklable, and opened by each process for itself."""

    name: str
    kind: str
    folders: dict[int, str]
    manifests: dict[int, dict[str, Any]] = field(repr=False)
    cache: CacheSettings | None = None

    def store(self, split: str, seq_len: int) -> RowStore:
        """The rows of a split: `train`, `evaluation` or `test`."""
        manifest = self.manifests[seq_len]
        shards = manifest["splits"][split]["shards"]
        pad = manifest["pad_id"]
        return RowStore.of_records(self.folders[seq_len], shards, seq_len=seq_len, pad_id=pad, cache=self.cache)

    @property
    def max_token_id(self) -> int:
        """Largest id in any row."""
        return max(int(manifest["max_token_id"]) for manifest in self.manifests.values())

    @property
    def audit_hashes(self) -> dict[str, str]:
        """`<source>@<length>` to the hash of what the data is."""
        return {f"{self.name}@{length}": str(m["audit_hash"]) for length, m in self.manifests.items()}


def read_manifest(folder: str) -> dict[str, Any] | None:
    """The manifest of a complete folder, else None."""
    path = paths.join(folder, MANIFEST)
    if not paths.exists(path):
        return None
    manifest: dict[str, Any] = json.loads(paths.read_text(path))
    return manifest
