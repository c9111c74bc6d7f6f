"""The identity of a run, compared on a resume, and safe reading of the config in a run folder.

The identity is the flattened config without the keys that may change on a resume. A run folder may come from anywhere,
so its config is untrusted data: nothing that it names is imported, and no interpolation is resolved, except what the
command line names itself.
"""

import dataclasses
import hashlib
import io
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tpu_experiments.config.checks import check
from tpu_experiments.config.data_schema import OWN_KEYS, PrepareConfig
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import PATTERNS
from tpu_experiments.config.objectives import FIRST, OBJECTIVES
from tpu_experiments.config.objectives.base import ObjectiveConfig, OwnObjectiveConfig
from tpu_experiments.config.redaction import REDACTED, redacted, redacted_text
from tpu_experiments.config.schema import (
    Config,
)
from tpu_experiments.config.trust import place_problems, stored_problems
from tpu_experiments.config.yaml_bounds import OF_VALUES, require_bounded

# Keys, or prefixes of keys, that do not change what is computed: batches are global, and a row's position in the data
# does not depend on them. `trainer.guard` matters only after a bad step, when its settings must be changeable.
MAY_CHANGE = (
    "hw.",
    "sharding.",
    "logger.",
    "callbacks",
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
    "rollout.reward_workers",
    "rollout.reward_memory_gib",
    "rollout.url",
    "rollout.adapter_folder",
    "rollout.max_seconds",
    "sample.prompts",
    "sample.at",
    "model.lora_targets",
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
    **{"named_splits": "take", "held_out_copies": "find", "near_copies": "drop", "rewritten_answers": "split"},
    "tokens_per_parameter": None,
    **{"asked_as": None, "asked_alone_as": None},
    "label_field": None,
    "teacher": None,
    "total_documents": None,
    "gives_messages": False,
    "weight_decay": None,
    **dict.fromkeys(("warmup_ratio", "min_lr", "decay_shape", "cycles", "power", "timescale")),
    **{key: None for keys in OWN_KEYS.values() for key in keys},
}
"""Values of keys of a source, stage or reward that have the same effect as leaving the key out."""
ADDED: dict[str, Any] = {
    "objective.margin": False,
    "hw.cuda_graphs": True,
    "hw.fusion_memory_mib": None,
    "model.base": "dense",
    "model.base_double_quant": True,
    "model.base_activations": "as_they_are",
    "model.linear": "plain",
    "model.linear_warmup_steps": 0,
    "model.linear_bits": 4,
    "model.linear_group": 0,
    "model.linear_activations": "as_they_are",
    "optim.b_lr_ratio": 1.0,
    "optim.scale_lr_ratio": 0.01,
    "optim.no_decay": [],
    "optim.ema": 0.0,
    "optim.options": {},
    **{"schedule.warmup_ratio": None, "schedule.min_lr": None, "schedule.timescale": None},
    **{"schedule.decay_shape": "linear", "schedule.cycles": 2, "schedule.power": 1.0},
    "lora.dora": False,
    "lora.target_parameters": [],
    "lora.rank_pattern": {},
    "lora.alpha_pattern": {},
    "lora.modules_to_save": [],
    "lora.ensure_weight_tying": False,
    "lora.trainable_token_indices": {},
    "model.added_tokens": [],
    "model.vocab_size": None,
    "model.micro_tokens": 8192,
    "objective.name": "next_token",
    "objective._target_": FIRST,
    "objective.z_loss": 0.0,
    "objective.whole_word": False,
}
"""Keys that runs, plans and tuned settings of earlier versions lack, with the value that they were computed with."""
_SET = object()
LENGTH = re.compile(
    r"trainer\.max_stage_steps|data\..+\.epochs|schedule\.\w+|curriculum\.stages\..+\.(steps|tokens|tokens_per_parameter|epochs|schedule\.\w+)"
)
"""Keys that set the lengths and learning-rate schedules of the stages."""
ONLY_OPEN = re.compile(r"model\.(row|step)_tokens|data\.[^.]+\.(p95|total)_tokens")
"""Keys that decide only the row length and rows per step of a new run, where open; both are in its identity."""


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


def without_added(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return flattened values without the keys of `ADDED` that have the value they stand for."""
    return {key: value for key, value in values.items() if ADDED.get(key, _SET) != value}


def identity(config: Config) -> dict[str, Any]:
    """Return the flattened config without the keys that may change; `inf` and `nan` are strings for JSON.

    Secrets are left out, since a run stays the same with another token for the same data. Keys that older runs lack are
    left out at values that have no effect (`UNSET`, `ADDED`, `start` without `start.run`, `rollout` where nothing is
    sampled).
    """
    kept = {key: _named(value) for key, value in flatten(config).items() if not key.startswith(MAY_CHANGE)}
    kept = without_added(kept)
    kept = {key: value for key, value in kept.items() if UNSET.get(key.rpartition(".")[2], _SET) != value}
    for key in PATTERNS:  # of several patterns that match, the first applies
        patterns = getattr(config.lora, key)
        kept |= {f"lora.{key}": list(patterns)} if len(patterns) > 1 else {}
    if config.start.run is None:
        kept = {key: value for key, value in kept.items() if not key.startswith("start.")}
    if not config.objective.samples_rollouts:
        kept = {key: value for key, value in kept.items() if not key.startswith("rollout.")}
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
    """Return the config's values, by key, that differ from a run folder's stored identity."""
    now = json.loads(json.dumps(identity(config), default=str))
    keys = (key for key in sorted(stored.keys() | now.keys()) if not ONLY_OPEN.fullmatch(key))
    return {key: now.get(key) for key in keys if stored.get(key) != now.get(key)}


def is_of_other_length(stored: Mapping[str, Any], config: Config) -> bool:
    """Return whether a config differs from the stored identity, and only in stage lengths and schedules."""
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


log = logging.getLogger(__name__)
MODEL_KEYS = ("seed", "plugins", "model", "lora", "curriculum", "prepare", "trainer")
"""Groups that determine a run's model, rows and row lengths. Hardware, sharding and loader are the command's own."""
DATA_KEYS = ("data", "data_size")


def config_of_run(config: Config, *, text: str, place: str, keys: tuple[str, ...] = MODEL_KEYS + DATA_KEYS) -> Config:
    """Return `config` with the values of `keys` from a run's config.yaml; arguments as of `values_of_run`.

    Raises:
        ConfigError: it is invalid, names code, or does not fit the command's hardware.
    """
    values = values_of_run(config, text=text, place=place, keys=keys)
    require_own_places(values, config, place=place)
    found = dataclasses.replace(config, **values)
    check(found)
    for key, url in _new_urls(values, config):
        log.warning("%s has the URL %s=%s, which this command does not name: it will be contacted", place, key, url)
    return found


def require_own_places(values: Mapping[str, Any], config: Config, *, place: str) -> None:
    """Check the local files that groups of a run's config name, before they are read.

    Args:
        place: the run's config.yaml.

    Raises:
        ConfigError: one is of a kind or in a place that only the command may name (`trust.place_problems`).
    """
    problems = list(place_problems(values, flatten(config), folder=place.rpartition("/")[0] or "."))
    if problems:
        raise ConfigError("\n".join(f"{place}; {problem}" for problem in problems[:8]))


def values_of_run(config: Config, *, text: str, place: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of `keys` in a run's config.yaml, as the fields of a Config.

    Where and how data is prepared comes from the command, so that a stored config cannot name a place to write to.

    Args:
        config: the command's config; only it may name plugins and classes from outside this package.
        text: content of the file at `place`.

    Raises:
        ConfigError: it is invalid, or it names code, an interpolation or a secret.
    """
    require_bounded(text, place=place)
    try:
        stored: Any = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
        # Runs from before objectives existed have none; the command's own then holds, the next token by default.
        chosen = {key: stored[key] for key in keys if key != "objective" or key in stored}
    except (OmegaConfBaseException, YAMLError, OSError, TypeError, *OF_VALUES) as error:
        raise _not_ours(place, error) from error  # OSError: the text is a single value
    problems = list(stored_problems(stored, flatten(config)))
    if problems:
        raise ConfigError("\n".join(f"{place}; {problem}" for problem in problems[:8]))
    chosen = _with_secrets_of(chosen, config, place=place)
    objective = chosen.pop("objective", None)
    try:
        merged: Any = OmegaConf.merge(OmegaConf.structured(Config), chosen)
        values = {key: _plain(merged[key]) for key in chosen}
        if objective is not None:
            values["objective"] = _plain(OmegaConf.merge(OmegaConf.structured(_objective_kind(objective)), objective))
    except (OmegaConfBaseException, KeyError, TypeError, ValueError) as error:
        raise _not_ours(place, error) from error
    if "plugins" in values:
        values["plugins"] = list(config.plugins)
    if "prepare" in values:
        values["prepare"] = _with_places_of(values["prepare"], config.prepare, place=place)
    return values


def _objective_kind(stored: Mapping[str, Any]) -> type[ObjectiveConfig]:
    """Return the schema of a stored objective, by its class."""
    own = {kind._target_: kind for kind in OBJECTIVES.values()}
    return own.get(stored["_target_"], OwnObjectiveConfig)


def _with_secrets_of(chosen: dict[str, Any], config: Config, *, place: str) -> dict[str, Any]:
    """Return the values with redacted secrets filled in from the command's own config.

    Raises:
        ConfigError: the command has no value for one of them.
    """
    now = flatten(config)
    written = redacted(now)

    def filled(node: Any, key: str) -> Any:
        if isinstance(node, dict):
            return {name: filled(value, f"{key}.{name}" if key else str(name)) for name, value in node.items()}
        if not isinstance(node, str | list) or REDACTED not in str(node):
            return node
        if key not in now or written[key] != node:
            raise ConfigError(
                f"{place}; {key}={node} was a secret and is not kept there; give this command the same {key}=, or, of "
                "task=evaluate, other data with task.data=selected data=NAME."
            )
        return now[key]

    return {key: filled(value, key) for key, value in chosen.items()}


def _with_places_of(stored: PrepareConfig, own: PrepareConfig, *, place: str) -> PrepareConfig:
    """Return a run's preparation settings, with this command's folder, engine and processes."""
    if stored.folder is not None and stored.folder != own.folder:
        log.info(
            "%s was prepared in prepare.folder=%s; this command looks for its rows in its own folder (prepare.folder=)",
            place,
            redacted_text(stored.folder),
        )
    names = [field.name for field in dataclasses.fields(own) if f"prepare.{field.name}" in MAY_CHANGE]
    return dataclasses.replace(stored, **{name: getattr(own, name) for name in names})


def _new_urls(values: Mapping[str, Any], config: Config) -> Iterator[tuple[str, str]]:
    """Yield URLs that the command itself does not name."""
    known = {str(value) for value in flatten(config).values()}
    for name, value in values.items():
        for key, text in flatten(value, name).items():
            if isinstance(text, str) and "://" in text and text not in known:
                yield key, text


def _not_ours(place: str, error: Exception) -> ConfigError:
    reason = str(error).partition("\n")[0]
    return ConfigError(
        f"{place}; it is not what this program writes ({reason}); it is from another version of it, or was "
        "changed: restore it, or train the run anew."
    )


def _plain(node: Any) -> Any:
    """Convert OmegaConf nodes to dataclasses and builtins."""
    return OmegaConf.to_object(node) if OmegaConf.is_config(node) else node
