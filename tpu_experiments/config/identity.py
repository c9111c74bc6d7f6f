"""What makes two runs the same run: the flattened config, its hash, and the keys that may change on a resume."""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.redaction import redacted
from tpu_experiments.config.schema import Config
from tpu_experiments.config.sources import OWN_KEYS

# None of these changes what is computed: batches are global, and a row's place in the data does not depend on them.
# `trainer.guard` does once a step went wrong, and then its settings are what somebody changes to go on.
MAY_CHANGE = (
    "hw.",
    "sharding.",
    "logger.",
    "checkpoint.",
    "prepare.folder",
    "prepare.engine",
    "prepare.workers",
    "prepare.documents",
    "prepare.written_epochs",
    "loader.loader_prefetch_size",
    "loader.device_prefetch_size",
    "loader.host_to_device_transfer_threads",
    "loader.read_ahead_mib",
    "loader.cache_gib",
    "sample.prompts",
    "sample.at",
    "output_dir",
    "plugins",
    "trainer.micro_batch_rows",
    "trainer.log_every_steps",
    "trainer.plan_check",
    "trainer.norms_every_steps",
    "trainer.on_recompile",
    "trainer.trace_every_steps",
    "trainer.profile.",
    "trainer.guard.",
    "trainer.canary.",
    "sweeping.",
    "tuned",
)


UNSET: dict[str, Any] = {
    **{"questions": {}, "keep": {}, "weight": None, "quoting": "auto"},
    **{"named_splits": "take", "held_out_copies": "find", "near_copies": "drop"},
    **{key: None for keys in OWN_KEYS.values() for key in keys},
}
"""Values of a source's keys that are as if the key were not there."""
_SET = object()
LENGTH = re.compile(
    r"trainer\.max_stage_steps|data\..+\.epochs|schedule\.\w+|curriculum\.stages\..+\.(steps|tokens|epochs|schedule\.\w+)"
)
"""Keys that say how long the stages of a run are, and how their learning rate goes."""


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return one `key.sub: value` per leaf; empty dicts and lists are leaves."""
    if dataclasses.is_dataclass(node):
        node = {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}
    if isinstance(node, dict) and node:
        flat: dict[str, Any] = {}
        for name, value in node.items():
            flat |= flatten(value, f"{prefix}.{name}" if prefix else str(name))
        return flat
    return {prefix: node}


def identity(config: Config) -> dict[str, Any]:
    """Return the flattened config without the keys that may change; `inf` and `nan` are strings for JSON.

    Secrets are left out: another token for the same data is the same run. So are keys that older runs lack, where they
    have the value that changes nothing (`UNSET`, and `start` where there is none).
    """
    kept = {key: _named(value) for key, value in flatten(config).items() if not key.startswith(MAY_CHANGE)}
    kept = {key: value for key, value in kept.items() if UNSET.get(key.rpartition(".")[2], _SET) != value}
    if config.start.run is None:
        kept = {key: value for key, value in kept.items() if not key.startswith("start.")}
    found: dict[str, Any] = redacted(kept)
    return found


def _named(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_named(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def config_hash(config: Config) -> str:
    """Return the first 16 hex digits of the SHA-256 of the identity."""
    text = json.dumps(identity(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def job_hash(config: Config) -> str:
    """Return a hash equal for plans of one job on other machines or with other ways to compute it."""
    free = ("name", "task.", "model.remat", "model.attention")
    job = {key: value for key, value in identity(config).items() if not key.startswith(free)}
    return hashlib.sha256(json.dumps(job, sort_keys=True, default=str).encode()).hexdigest()[:16]


def changes(stored: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The keys in which a config differs from a run folder's stored identity, with its own values."""
    now = json.loads(json.dumps(identity(config), default=str))
    return {key: now.get(key) for key in sorted(stored.keys() | now.keys()) if stored.get(key) != now.get(key)}


def is_of_other_length(stored: Mapping[str, Any], config: Config) -> bool:
    """Whether a config differs in nothing but the lengths and schedules of its stages, and in these it does."""
    found = changes(stored, config)
    return bool(found) and all(LENGTH.fullmatch(key) for key in found)


def require_same(stored: Mapping[str, Any], config: Config, *, folder: str) -> None:
    """Compare a run folder's stored identity with this config.

    Raises:
        ConfigError: they differ; every changed key is listed with both values.
    """
    now = changes(stored, config)
    changed = list(now)
    if not changed:
        return
    shown = "; ".join(f"{key}={stored.get(key)!r}, now {now[key]!r}" for key in changed[:8])
    more = f"; and {len(changed) - 8} more" if len(changed) > 8 else ""
    raise ConfigError(
        f"name={config.name}; {folder} was made with {shown}{more}; choose another name= or restore the values."
    )
