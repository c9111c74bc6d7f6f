"""Settings of preference training on pairs."""

from dataclasses import dataclass
from typing import ClassVar

from tpu_experiments.config.data_schema import PrepareConfig
from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.objectives.base import ObjectiveConfig
from tpu_experiments.config.objectives.next_token import NextTokenConfig

WITHOUT_REFERENCE = ("simpo", "orpo")
"""Losses of the model alone."""
SMOOTHED = ("sigmoid", "robust")
"""Losses with `label_smoothing`."""
BETAS = {"simpo": 2.0}
"""Values of `beta` where it is null; 0.1 of other losses."""


@dataclass
class PreferenceConfig(ObjectiveConfig):
    """Chosen answers over rejected ones (DPO, arXiv 2305.18290, and its relatives)."""

    _target_: str = "tpu_experiments.objectives.preference.Preference"
    reads_pairs: ClassVar[bool] = True
    ranked_by: ClassVar[str | None] = "rewards/accuracies"
    for_files: ClassVar[tuple[str, ...]] = (
        *("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "logps/accuracies"),
        *("chosen_loss", "chosen_tokens", "rejected_tokens"),
    )
    lr_factor: ClassVar[float] = 1 / 40
    """Zephyr's rates (arXiv 2310.16944): 5e-6 of adapters and 5e-7 of all weights, where `model.lr` is 2e-4."""
    loss: str = choice("sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "simpo", "orpo", default="sigmoid")
    """Loss of a pair (objectives/preference.py has the formulas)."""
    beta: float | None = number(default=None, above=0)
    """How strongly the model is held to its reference; of `simpo` and `orpo` the factor of the margin. Null is 0.1, of
    `simpo` 2."""
    label_smoothing: float = number(default=0.0, at_least=0, below=0.5)
    """Share of the pairs that are assumed to be the wrong way round; of `sigmoid` and `robust`."""
    gamma_beta_ratio: float = number(default=0.5, at_least=0)
    """Margin of `simpo` over beta (arXiv 2405.14734: 0.3 to 0.5)."""
    sft_weight: float = number(default=0.0, at_least=0)
    """Factor of the mean -log p of the chosen answers' tokens, which is added to the loss (RPO, arXiv 2404.19733)."""

    def reads_reference(self) -> bool:
        """Return whether the loss compares with the model as it starts."""
        return self.loss not in WITHOUT_REFERENCE

    def planned_as(self) -> ObjectiveConfig:
        """Return the settings of next tokens: a step is theirs, one pass and its gradient, and sums over segments."""
        return NextTokenConfig(name="next_token")

    def inputs(self) -> dict[str, float]:
        """Return the numbers of the loss; a weight of 0 is none of them, since the loss then has one part less."""
        found = {"beta": BETAS.get(self.loss, 0.1) if self.beta is None else self.beta}
        if self.loss in SMOOTHED:
            found["label_smoothing"] = self.label_smoothing
        if self.loss == "simpo":
            found["gamma_beta_ratio"] = self.gamma_beta_ratio
        if self.sft_weight or self.loss == "orpo":
            found["sft_weight"] = self.sft_weight + (1.0 if self.loss == "orpo" else 0.0)
        return found

    def problems(self, prepare: PrepareConfig) -> list[str]:
        """Return what is wrong with the settings."""
        if not self.label_smoothing or self.loss in SMOOTHED:
            return []
        return [
            f"objective.label_smoothing={self.label_smoothing:g} with objective.loss={self.loss}; only "
            f"{' and '.join(SMOOTHED)} smooth labels; set it to 0, or use objective.loss={SMOOTHED[0]}."
        ]
