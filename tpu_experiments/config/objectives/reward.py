"""Settings of reward models."""

from dataclasses import dataclass, replace
from typing import ClassVar

from tpu_experiments.config.fields import number
from tpu_experiments.config.objectives.base import ObjectiveConfig


@dataclass
class RewardConfig(ObjectiveConfig):
    """A score of answers, higher for the chosen one of a pair (Bradley-Terry; arXiv 2203.02155, equation 1)."""

    _target_: str = "tpu_experiments.objectives.reward.Reward"
    reads_pairs: ClassVar[bool] = True
    ranked_by: ClassVar[str | None] = "rewards/accuracies"
    for_files: ClassVar[tuple[str, ...]] = (
        *("rewards/chosen", "rewards/rejected", "chosen_tokens", "rejected_tokens"),
    )
    asks_questions: ClassVar[bool] = False
    """A reward model writes nothing, and has its pairs in common with objectives whose models do."""
    lr_factor: ClassVar[float] = 1 / 2
    """1e-4 of adapters, TRL's default, and 1e-5 of all weights, where `model.lr` is 2e-4."""
    why_alone: ClassVar[str | None] = "objective=reward trains a head beside the adapter"
    center_rewards_coefficient: float = number(default=0.0, at_least=0)
    """Factor of the mean squared sum of a pair's two scores, which is added to the loss so that scores stay near 0
    (arXiv 2312.09244: 0.01). The loss alone leaves their level open."""

    margin: bool = False
    """Whether the field `margin` of every pair, a number, is subtracted from the difference of its scores in the loss,
    so that answers of which one is much better are driven further apart (Llama 2, arXiv 2307.09288, equation 2)."""

    def reads_margin(self) -> bool:
        """Return whether margins are read."""
        return self.margin

    def on_data_of(self, other: ObjectiveConfig) -> ObjectiveConfig:
        """Return the settings with margins where the other's pairs have them."""
        return replace(self, margin=other.reads_margin())

    def known_labels(self) -> list[str] | None:
        """Return transformers' name of a single output."""
        return ["LABEL_0"]
