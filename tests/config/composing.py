"""Compose a config the way run.py does, and the message a user would see when it is refused."""

from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from tests.jobs import of_tiny_job
from tpu_experiments.config.compose import to_config
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.messages import sentence
from tpu_experiments.config.overlay import with_own_entries
from tpu_experiments.config.schema import Config, register

CONF = Path(__file__).parents[2] / "conf"
register()


def composed(*overrides: str) -> Config:
    """The checked config of the tiny job with these overrides, or of a recipe."""
    return composed_as_typed(*of_tiny_job(overrides))


def composed_as_typed(*overrides: str) -> Config:
    """The checked config of a command; `~local` keeps a developer's own conf/local/default.yaml out of it."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return to_config(compose("config", overrides=["~local", *with_own_entries(list(overrides))]))


def refusal(*overrides: str) -> str:
    """The message of the ConfigError, or the sentence made of Hydra's."""
    try:
        composed(*overrides)
    except ConfigError as error:
        return str(error)
    except (HydraException, OmegaConfBaseException) as error:
        return sentence(error)
    raise AssertionError(f"{overrides} was accepted")


def names(group: str) -> list[str]:
    """The choices of a group: its YAML files."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))
