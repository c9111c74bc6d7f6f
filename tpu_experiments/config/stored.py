"""The config of a run folder, read back: what a run was trained with, under the machine of this command."""

import dataclasses
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tpu_experiments.config.checks import check
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config

MODEL_KEYS = ("seed", "plugins", "model", "lora", "curriculum", "prepare", "trainer")
"""What a run's model, rows and their lengths come from. Hardware, sharding and loader are the command's own."""
DATA_KEYS = ("data", "data_size")


def config_of_run(config: Config, *, text: str, place: str, keys: tuple[str, ...] = MODEL_KEYS + DATA_KEYS) -> Config:
    """`config` with the values of `keys` from a run's config.yaml; arguments as of `values_of_run`.

    Raises:
        ConfigError: it is not what this program writes, or does not go with the command's hardware.
    """
    found = dataclasses.replace(config, **values_of_run(text, place=place, keys=keys))
    check(found)
    return found


def values_of_run(text: str, *, place: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """The values of `keys` in a run's config.yaml, as the fields of a Config.

    Args:
        text: content of that file, which lies at `place`.

    Raises:
        ConfigError: it is not what this program writes.
    """
    try:
        stored: Any = OmegaConf.create(text)
        chosen = {key: stored[key] for key in keys}
        merged: Any = OmegaConf.merge(OmegaConf.structured(Config), chosen)
        return {key: _plain(merged[key]) for key in keys}
    except (OmegaConfBaseException, YAMLError, KeyError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{place}; it is not what this program writes ({reason}); it is from another version of it, or was "
            "changed: restore it, or train the run anew."
        ) from error


def _plain(node: Any) -> Any:
    """Dataclasses and builtins, nothing of OmegaConf."""
    return OmegaConf.to_object(node) if OmegaConf.is_config(node) else node
