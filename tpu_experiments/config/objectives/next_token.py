"""Settings of next-token prediction."""

from dataclasses import dataclass
from typing import ClassVar

from tpu_experiments.config.fields import number
from tpu_experiments.config.objectives.base import ObjectiveConfig


@dataclass
class NextTokenConfig(ObjectiveConfig):
    """Every token from those before it in its document."""

    _target_: str = "tpu_experiments.objectives.next_token.NextToken"
    takes_rounded_weights: ClassVar[bool] = True
    counts_flops: ClassVar[bool] = False
    z_loss: float = number(default=0.0, at_least=0)
    """Factor of log(Z)^2, which is added to the training loss of every token so that logits stay small (PaLM, arXiv
    2204.02311: 1e-4); 0 adds nothing. Held-out losses are without it."""
