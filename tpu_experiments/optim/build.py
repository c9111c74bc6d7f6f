"""From the config to its optimizer."""

from dataclasses import asdict

from tpu_experiments.config.schema import Config
from tpu_experiments.config.targets import locate
from tpu_experiments.optim.base import Optimizer
from tpu_experiments.optim.decay_groups import DecayGroups
from tpu_experiments.optim.ema import AveragedOptimizer
from tpu_experiments.optim.lora_plus import LoraPlus
from tpu_experiments.optim.scale_rate import ScaleRate
from tpu_experiments.optim.stage_decay import StageDecay
from tpu_experiments.runtime.stacked import LEARNT_SCALE

OF_WRAPPERS = ("lr", "clip_norm", "b_lr_ratio", "scale_lr_ratio", "no_decay", "ema")
"""Keys of `optim` that are no settings of the class."""


def has_stage_decay(config: Config) -> bool:
    """Return whether a stage has a weight decay of its own."""
    return any(stage.weight_decay is not None for stage in config.curriculum.stages.values())


def optimizer_of(config: Config) -> Optimizer:
    """Make the optimizer that `optim._target_` names, with the settings of `optim`."""
    chosen, settings = config.optim, asdict(config.optim)
    for name in ("_target_", *OF_WRAPPERS):
        settings.pop(name)
    kind = locate(chosen._target_, key="optim")
    is_rounded = config.model.linear == "lr_qat"
    no_decay = [*chosen.no_decay, *([f"*.{LEARNT_SCALE}"] if is_rounded else [])]
    if has_stage_decay(config):
        optimizer: Optimizer = StageDecay(kind(**{**settings, "weight_decay": 0.0}), no_decay=no_decay)
    else:
        optimizer = kind(**settings)
    if no_decay and not has_stage_decay(config):
        without_decay = kind(**{**settings, "weight_decay": 0.0})
        optimizer = DecayGroups(optimizer, without_decay, patterns=no_decay)
    if is_rounded:
        optimizer = ScaleRate(optimizer, ratio=chosen.scale_lr_ratio)
    if chosen.b_lr_ratio != 1:
        optimizer = LoraPlus(optimizer, ratio=chosen.b_lr_ratio)
    return AveragedOptimizer(optimizer, decay=chosen.ema) if chosen.ema else optimizer
