"""The command's config composed again with other overrides laid over it: other machines, other settings of a search."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.load import to_config
from tpu_experiments.config.refusals import sentence
from tpu_experiments.config.schema import Config
from tpu_experiments.config.sources import ShardingConfig

CONF = Path(__file__).parents[2] / "conf"


def variant(*overrides: str) -> Config:
    """Compose this command's config again with further overrides, which take precedence.

    Raises:
        ConfigError: the checks or Hydra refuse them.
    """
    return _checked([*HydraConfig.get().overrides.task, *overrides])


@cache
def machine(name: str) -> HwConfig:
    """Return a machine of conf/hw as its file defines it.

    Raises:
        ConfigError: there is no such file.
    """
    return _checked([f"hw={name}", "task=plan", "trainer.global_batch_rows=256", "~local"]).hw


@cache
def shipped(model: str, hw: str) -> Config:
    """Return the config of a model of conf/model on a machine of conf/hw, without other overrides.

    Raises:
        ConfigError: there is no such file.
    """
    return _checked([f"model={model}", f"hw={hw}", "task=plan", "trainer.global_batch_rows=256", "~local"])


@cache
def sharding_table(name: str) -> ShardingConfig:
    """Return a table of conf/sharding as its file defines it.

    Raises:
        ConfigError: there is no such file.
    """
    return _checked([f"sharding={name}", "task=plan", "~local"]).sharding


def _checked(overrides: Sequence[str]) -> Config:
    try:
        return to_config(_composed(list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(sentence(error)) from error


def _composed(overrides: list[str]) -> DictConfig:
    if GlobalHydra.instance().is_initialized():
        return compose("config", overrides=overrides)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=overrides)
