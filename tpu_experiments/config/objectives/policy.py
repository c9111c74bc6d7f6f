"""Settings of policy gradients on groups of the model's own answers (GRPO and its kin)."""

from dataclasses import dataclass
from typing import ClassVar

from tpu_experiments.config.data_schema import PrepareConfig
from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.objectives.base import ObjectiveConfig

LEAVES_ONE_OUT = ("rloo",)
"""Losses whose baseline of an answer is the mean of the others of its group, and whose KL lowers the reward."""


@dataclass
class PolicyConfig(ObjectiveConfig):
    """Answers by their rewards (GRPO, arXiv 2402.03300, and its relatives)."""

    _target_: str = "tpu_experiments.objectives.policy.Policy"
    samples_rollouts: ClassVar[bool] = True
    ranked_by: ClassVar[str | None] = "reward"
    lr_factor: ClassVar[float] = 1 / 40
    why_alone: ClassVar[str | None] = "a policy objective samples its own rows"
    loss: str = choice("grpo", "dapo", "dr_grpo", "bnpo", "rloo", default="dapo")
    """What a token's loss is divided by, or RLOO (objectives/policy.py has the formulas)."""
    epsilon: float = number(default=0.2, at_least=0, below=1)
    """Ratios below 1 - epsilon are clipped where the advantage is negative."""
    epsilon_high: float | None = number(default=None, at_least=0)
    """Ratios above 1 + epsilon_high are clipped where it is positive; null is `epsilon`, DAPO has 0.28."""
    beta: float = number(default=0.0, at_least=0)
    """Factor of the KL to the model as it starts; 0 does not compute it."""
    ratio: str = choice("token", "sequence", default="token")
    """Whether a ratio is of one token or the geometric mean of its answer's (GSPO, arXiv 2507.18071); of `rloo` it is
    the product."""
    scale: str = choice("group", "batch", "none", default="group")
    """Standard deviation that advantages are divided by; `rloo` takes `batch` or `none`."""
    max_weight: float = number(default=3.0, above=0)
    """Largest weight of a token whose sampler had another log-probability, exp(old - sampler's)."""
    old: str = choice("rows", "own", default="rows")
    """Where the log-probabilities behind a ratio are from: the rollout, or, where each has one update, the model."""

    def leaves_one_out(self) -> bool:
        """Return whether the baseline of an answer is the mean of the others."""
        return self.loss in LEAVES_ONE_OUT

    def reads_start(self) -> bool:
        """Return whether there is a KL to the model as the run starts."""
        return self.beta > 0

    def problems(self, prepare: PrepareConfig) -> list[str]:
        """Return what is wrong with the settings."""
        if self.leaves_one_out() and self.scale == "group":
            return [
                f"scale=group with loss={self.loss}; advantages without the answer itself are not "
                "divided by the spread of the group; use scale=none or batch."
            ]
        return []
