"""Settings of replaced-token detection."""

from dataclasses import dataclass
from typing import ClassVar

from tpu_experiments.config.fields import number
from tpu_experiments.config.objectives.base import ObjectiveConfig


@dataclass
class ReplacedTokenConfig(ObjectiveConfig):
    """Replaced tokens detected by one model, drawn by another (ELECTRA, arXiv 2003.10555; DeBERTa-v3, 2111.09543)."""

    _target_: str = "tpu_experiments.objectives.replaced_token.ReplacedToken"
    trains_encoders: ClassVar[bool] = True
    mask_rate: float = number(default=0.15, above=0, below=1)
    """Share of the tokens to be learnt that are masked for the generator, by chance."""
    mask_token: str | None = None
    """Token that stands for a masked one where the tokenizer has no mask token of its own: a reserved one, that no text
    contains."""
    rtd_weight: float = number(default=50.0, above=0)
    """Factor of the discriminator's loss: 50 in the papers, 10 in the script of microsoft/DeBERTa. Since the two models
    share no gradient and are clipped apart, AdamW's updates depend on it only where gradients are clipped."""
    temperature: float = number(default=1.0, above=0)
    """Divides the generator's logits before replacements are drawn."""
    generator_clip_norm: float | None = number(default=None, above=0)
    """Largest norm of the generator's gradient; null is `optim.clip_norm`, which the discriminator's gradient has."""
    generator_rate: float = number(default=1.0, above=0)
    """Learning rate of the generator over that of the discriminator."""
