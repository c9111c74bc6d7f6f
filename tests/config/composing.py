"""Compose a config the way run.py does, and the message a user would see when it is refused."""

import functools
import pickle
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
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
    words = ["~local", *with_own_entries(list(overrides))]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return to_config(composition(words))


def composition(words: Sequence[str]) -> DictConfig:
    """Return what Hydra composes of the words: a copy of what the chosen files come to, then the values.

    Hydra takes 0.12 s for the files, of 1,500 compositions in the tests. What it refuses, it composes as a whole.
    """
    values = [word for word in words if not _is_choice(word)]
    try:
        parsed = [_parsed(word) for word in values]
        if not any(word.is_sweep_override() or word.is_hydra_override() for word in parsed):
            composed = pickle.loads(_of_files(tuple(word for word in words if _is_choice(word))))
            ConfigLoaderImpl._apply_overrides_to_config(parsed, composed)
            return composed
    except (HydraException, OmegaConfBaseException):
        pass
    return compose("config", overrides=list(words))


def _is_choice(word: str) -> bool:
    """Tell whether a word chooses files of a group, whose folder has its name."""
    group = word.partition("=")[0].lstrip("+~").partition("@")[0]
    return bool(group) and (CONF / group).is_dir()


@functools.cache
def _parsed(word: str) -> Override:
    (parsed,) = OverridesParser.create().parse_overrides([word])
    return parsed


@functools.cache
def _of_files(choices: tuple[str, ...]) -> bytes:
    """Compose files and pickle the result, which takes 3 ms of CPU to read again; `copy.deepcopy` takes 12."""
    return pickle.dumps(compose("config", overrides=list(choices)))


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


def sources_of_pairs() -> list[str]:
    """Return the sources of preference pairs, which only an objective that compares answers reads."""
    return [name for name in names("data") if "kind: preference" in (CONF / "data" / f"{name}.yaml").read_text()]


@functools.cache
def of_file(group: str, choice: str) -> DictConfig:
    """What a file of a group says over the files that it builds on; for lists of cases, which every worker makes."""
    own = OmegaConf.load(CONF / group / f"{choice}.yaml")
    names_below = [name for name in own.pop("defaults", []) if (CONF / group / f"{name}.yaml").exists()]
    merged = OmegaConf.merge(*(of_file(group, name) for name in names_below), own)
    assert isinstance(merged, DictConfig)
    return merged
