"""Prepared data as training reads it: a manifest and shards of rows for every source and row length.

<folder>/<source>-rows-<length>-<key>/manifest.json   numbers, hashes and names of the shards; written last
                                      train/00000.npy, evaluation/…, test/…
                                      reported.jsonl  every row that is not in the data: reason, place, message
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tpu_experiments.data.rows import Array
from tpu_experiments.data.steps.labels import LABELS, with_labels_of_ids
from tpu_experiments.data.store.shards import RowStore
from tpu_experiments.data.store.stream import CacheSettings, Check
from tpu_experiments.storage import paths
from tpu_experiments.storage.sealed import DamagedFile, read_sealed_json

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
Key = tuple[str, str, int]
"""Source, split and row length."""
ADVICE = "Run task=prepare with the same settings: it is prepared again."


class NotPrepared(Exception):
    """A lookup found no prepared rows of a source."""


@dataclass(frozen=True)
class PreparedSource:
    """One source's rows by their length; picklable, since each process opens the files itself."""

    name: str
    kind: str
    folders: dict[int, str]
    manifests: dict[int, dict[str, Any]] = field(repr=False)
    cache: CacheSettings | None = None
    check: Check = "none"
    """When local shards are verified against the manifest, if that was not done before."""

    def store(self, split: str, seq_len: int) -> RowStore:
        """Return the rows of a split: `train`, `evaluation` or `test`."""
        manifest = self.manifests[seq_len]
        shards = manifest["splits"][split]["shards"]
        pad = manifest["pad_id"]
        revise = with_labels_of_ids if "labels" in manifest and "arrays" not in manifest else None
        return RowStore.of_records(
            self.folders[seq_len],
            shards,
            seq_len=seq_len,
            pad_id=pad,
            cache=self.cache,
            check=self.check,
            revise=revise,
        )

    def arrays(self, seq_len: int) -> tuple[Array, ...]:
        """Return the further arrays of the rows."""
        manifest = self.manifests[seq_len]
        before = [asdict(LABELS)] if "labels" in manifest else []
        return tuple(Array(**entry) for entry in manifest.get("arrays", before))

    @property
    def max_token_id(self) -> int:
        """Largest token id in any row."""
        return max(int(manifest["max_token_id"]) for manifest in self.manifests.values())

    @property
    def audit_hashes(self) -> dict[str, str]:
        """Hash of the data's content by `<source>@<length>`."""
        return {f"{self.name}@{length}": str(m["audit_hash"]) for length, m in self.manifests.items()}


def read_manifest(folder: str, *, expected: Mapping[str, Any], is_lookup: bool = False) -> dict[str, Any] | None:
    """Read the manifest of a complete folder; arguments, result and errors as for `read_record`."""
    return read_record(paths.join(folder, MANIFEST), expected=expected, is_lookup=is_lookup)


def read_record(path: str, *, expected: Mapping[str, Any], is_lookup: bool = False) -> dict[str, Any] | None:
    """Read a sealed file of prepared data; None if it is missing, or damaged, which is logged.

    Args:
        expected: entries that the file must have, to detect another folder's file.

    Raises:
        DamagedFile: the file is damaged, and `is_lookup` forbids making it again.
    """
    try:
        return read_sealed_json(path, expected=expected)
    except FileNotFoundError:
        return None
    except DamagedFile as error:
        if is_lookup:
            raise DamagedFile(f"{error} {ADVICE}") from error
        log.warning("%s It is prepared again.", error)
        return None
