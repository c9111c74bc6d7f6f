"""From the config to prepared data: tokenizer, readers of the user's own, folders and caches."""

import logging
from dataclasses import replace
from typing import Literal

from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.build import locate
from tpu_experiments.config.curriculum import Stage, resolve_stages, skipped_stages
from tpu_experiments.config.schema import Config
from tpu_experiments.config.sources import DataSourceConfig
from tpu_experiments.data.prepare import Preparation, prepare
from tpu_experiments.data.prepared import PreparedSource
from tpu_experiments.data.store.stream import CacheSettings
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.io import paths
from tpu_experiments.io.cache import default_folder

log = logging.getLogger(__name__)
MIB, GIB = 2**20, 2**30
DEFAULT_READER = DataSourceConfig.__dataclass_fields__["_target_"].default
"""Reads file by file, in many processes; any other one is read from start to end."""


def tokenizer_of(config: Config) -> str:
    """Return the tokenizer's folder or Hub id: the shipped one for a tiny model, else the model's own."""
    if config.model.tokenizer_path:
        return config.model.tokenizer_path
    return "tpu_experiments/samples/tokenizer" if config.model.size == "tiny" else config.model.path


def tokenizer_for(config: Config) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the run, with its chat template.

    Raises:
        ConfigError: there is none, or it does not match the settings.
    """
    return load_tokenizer(
        tokenizer_of(config),
        revision=config.model.revision,
        chat_template_path=config.model.chat_template_path,
        chat_format=config.model.chat_format,
        remote_code=config.model.remote_code,
    )


def prepared_folder(config: Config) -> str:
    """Return the folder of prepared data."""
    return config.prepare.folder or paths.join(config.output_dir, "prepared")


def prepare_sources(
    config: Config,
    *,
    tokenizer: PreTrainedTokenizerBase,
    stages: list[Stage],
    is_lookup: bool = False,
    verify: Literal["rows", "all"] = "rows",
) -> dict[str, PreparedSource]:
    """Return the rows of every source at every row length, prepared now or reused.

    `verify` is that of `Preparation`.

    Raises:
        NotPrepared: some are missing, and `is_lookup` forbids preparing them.
        ConfigError: a source that cannot be read, is empty, or leaves no row to train or hold out.
    """
    return prepare(
        config.data,
        data_size=config.data_size,
        seq_lens=sorted({stage.geometry.seq_len for stage in stages}),
        how=replace(preparation(config, tokenizer=tokenizer, is_lookup=is_lookup), verify=verify),
    )


def preparation(config: Config, *, tokenizer: PreTrainedTokenizerBase, is_lookup: bool = False) -> Preparation:
    """Return how and where the sources of a config are prepared."""
    folder = prepared_folder(config)
    loader = config.loader
    cache = CacheSettings(
        folder=default_folder(), max_bytes=int(loader.cache_gib * GIB), read_ahead_bytes=loader.read_ahead_mib * MIB
    )
    readers = {
        name: locate(source._target_, key=f"data.{name}")
        for name, source in config.data.items()
        if source._target_ != DEFAULT_READER
    }
    return Preparation(
        config.prepare, folder, tokenizer, readers, cache if paths.is_remote(folder) else None, is_lookup
    )


def stages_of(config: Config) -> list[Stage]:
    """Return the stages that have a source; the others are logged."""
    for name in skipped_stages(config):
        log.info("stage %s is left out: no source of its kind in data=%s", name, list(config.data))
    return resolve_stages(config)
