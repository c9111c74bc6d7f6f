"""From the config to its optimizer."""

from dataclasses import asdict

from tpu_experiments.config.schema import Config
from tpu_experiments.config.targets import locate
from tpu_experiments.optim.base import Optimizer
from tpu_experiments.optim.lora_plus import LoraPlus


def optimizer_of(config: Config) -> Optimizer:
    """Make the optimizer that `optim._target_` names, with the settings of `optim`."""
    settings = asdict(config.optim)
    for name in ("_target_", "lr", "clip_norm", "b_lr_ratio"):
        settings.pop(name)
    optimizer: Optimizer = locate(config.optim._target_, key="optim")(**settings)
    ratio = config.optim.b_lr_ratio
    return optimizer if ratio == 1 else LoraPlus(optimizer, ratio=ratio)
