"""Settings of distillation."""

from dataclasses import dataclass
from typing import ClassVar

from tpu_experiments.config.fields import choice, number
from tpu_experiments.config.objectives.base import ObjectiveConfig


@dataclass
class DistillationConfig(ObjectiveConfig):
    """Stored predictions of a teacher (arXiv 1503.02531; GKD's divergences, arXiv 2306.13649)."""

    _target_: str = "tpu_experiments.objectives.distillation.Distillation"
    counts_flops: ClassVar[bool] = False
    top_k: int = number(default=64, at_least=1)
    """Likeliest tokens of the teacher that every token is compared in; at most those that `data.<name>.teacher` holds.
    task=prepare with `task.teacher` stores so many."""
    temperature: float = number(default=1.0, above=0)
    """Divides the logits of both. What is stored has one temperature; another needs `rest=renormalised`. The loss is
    not multiplied by its square, as TRL's is not."""
    beta: float = number(default=0.0, at_least=0, at_most=1)
    """0: forward KL(teacher || student). 1: reverse KL(student || teacher). Between: GKD's generalised Jensen-Shannon
    divergence."""
    rest: str = choice("bucket", "renormalised", default="bucket")
    """What becomes of the mass outside `top_k`: one more category, or both models' probabilities are divided by their
    sum over `top_k` (models/passes/distillation.py)."""
    alpha: float = number(default=0.0, at_least=0, below=1)
    """Share of the data's own tokens in the loss: alpha times their cross-entropy plus 1 - alpha times the
    divergence."""

    def teacher_entries(self) -> int:
        """Return the teacher's tokens that every token of a row carries."""
        return self.top_k

    def teacher_temperature(self) -> float:
        """Return the temperature."""
        return self.temperature

    def converts_temperature(self) -> bool:
        """Return whether what is left of both is divided by its sum."""
        return self.rest == "renormalised"

    def inputs(self) -> dict[str, float]:
        """Return the numbers of the loss; a beta of 0 or 1 is another formula."""
        return {"alpha": self.alpha, **({"beta": self.beta} if 0 < self.beta < 1 else {})}
