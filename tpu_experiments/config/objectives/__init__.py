"""Settings of objectives, one file for each; a config of conf/objective takes `base_NAME` of its own."""

from tpu_experiments.config.objectives.base import ObjectiveConfig
from tpu_experiments.config.objectives.classify import ClassifyConfig
from tpu_experiments.config.objectives.distillation import DistillationConfig
from tpu_experiments.config.objectives.kto import KtoConfig
from tpu_experiments.config.objectives.masked import MaskedConfig
from tpu_experiments.config.objectives.masked_diffusion import MaskedDiffusionConfig
from tpu_experiments.config.objectives.next_token import NextTokenConfig
from tpu_experiments.config.objectives.policy import PolicyConfig
from tpu_experiments.config.objectives.preference import PreferenceConfig
from tpu_experiments.config.objectives.replaced_token import ReplacedTokenConfig
from tpu_experiments.config.objectives.reward import RewardConfig

OBJECTIVES: dict[str, type[ObjectiveConfig]] = {
    "next_token": NextTokenConfig,
    "mlm": MaskedConfig,
    "rtd": ReplacedTokenConfig,
    "classify": ClassifyConfig,
    "masked_diffusion": MaskedDiffusionConfig,
    **dict.fromkeys(("dpo", "ipo", "simpo", "orpo"), PreferenceConfig),
    "kto": KtoConfig,
    **dict.fromkeys(("grpo", "rloo"), PolicyConfig),
    "reward": RewardConfig,
    "distillation": DistillationConfig,
}
"""Objectives of this project by the names of their files in conf/objective."""
TARGETS = frozenset(kind._target_ for kind in OBJECTIVES.values())
"""Their classes."""
EVALUATED = frozenset(kind._target_ for kind in OBJECTIVES.values() if kind.is_evaluated)
"""Those whose runs task=evaluate scores."""
FIRST = NextTokenConfig._target_
"""The only class that runs had before there was a choice."""
