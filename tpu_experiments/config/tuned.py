"""Settings that change only the speed and memory of a run, and detection of those set by the command.

Those that are not set may come from conf/tuned.yaml, from which planning/tuned.py chooses.
"""

from dataclasses import replace
from typing import Any

from hydra.core.hydra_config import HydraConfig

from tpu_experiments.config.compose import shipped
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import flatten
from tpu_experiments.config.schema import Config

KEPT = ("model.stack", "model.stack_group", "model.remat", "trainer.loss_chunk_tokens")
"""Settings that change the last bits of sums and so belong to a run's identity; a resumed run keeps its values."""
SPEED = (*KEPT, "sharding", "hw.attention_block", "hw.fusion_memory_mib", "trainer.micro_batch_rows")


def value_of(config: Config, key: str) -> Any:
    """Return the value of one of `SPEED`; for sharding, its name."""
    return config.sharding.name if key == "sharding" else flatten(config).get(key)


def given(config: Config) -> set[str]:
    """Return the keys of `SPEED` that the command or one of its files sets to another value than shipped.

    A key named on the command line counts with any value.
    """
    words = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    named = {word.partition("=")[0].lstrip("+~") for word in words}
    try:
        base = shipped(config.model.name, config.hw.name)
    except ConfigError:  # a custom model or machine
        return set(SPEED)
    return {key for key in SPEED if key in named or value_of(config, key) != value_of(base, key)}


def with_values(config: Config, values: dict[str, Any]) -> Config:
    """Return the config with other values of `group.key`."""
    for key, value in values.items():
        group, _, name = key.partition(".")
        config = replace(config, **{group: replace(getattr(config, group), **{name: value})})
    return config
