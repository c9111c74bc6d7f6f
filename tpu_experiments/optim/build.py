"""From the config to its optimizer."""

from dataclasses import asdict

from tpu_experiments.config.schema import Config
from tpu_experiments.config.targets import locate
from tpu_experiments.optim.base import Optimizer


def optimizer_of(config: Config) -> Optimizer:
    """Make the optimizer that `optim._target_` names, with the settings of `optim`."""
    settings = asdict(config.optim)
    for name in ("_target_", "lr", "clip_norm"):
        settings.pop(name)
    optimizer: Optimizer = locate(config.optim._target_, key="optim")(**settings)
    return optimizer
