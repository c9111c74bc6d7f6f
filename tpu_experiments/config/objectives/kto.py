"""Settings of KTO."""

from dataclasses import dataclass
from typing import ClassVar

from tpu_experiments.config.fields import number
from tpu_experiments.config.objectives.base import ObjectiveConfig


@dataclass
class KtoConfig(ObjectiveConfig):
    """Good answers made likelier and bad ones less, each by itself (KTO, arXiv 2402.01306)."""

    _target_: str = "tpu_experiments.objectives.kto.Kto"
    reads_pairs: ClassVar[bool] = True
    reads_single: ClassVar[bool] = True
    ranked_by: ClassVar[str | None] = "rewards/accuracies"
    for_files: ClassVar[tuple[str, ...]] = (
        *("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "chosen_tokens", "rejected_tokens"),
    )
    lr_factor: ClassVar[float] = 1 / 40
    """Those of pairs: the paper's 5e-7 of all weights."""
    beta: float = number(default=0.1, above=0)
    """How strongly the model is held to its reference."""
    desirable_weight: float = number(default=1.0, above=0)
    """Factor of the loss of good answers. The paper keeps its product with their number at 1 to 4/3 of that of bad
    ones; the audit says what that is for the data."""
    undesirable_weight: float = number(default=1.0, above=0)
    """Factor of the loss of bad answers."""

    def reads_reference(self) -> bool:
        """Return that it compares with the model as it starts."""
        return True
