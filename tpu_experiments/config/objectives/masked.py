"""Settings of masked language modelling."""

from dataclasses import dataclass
from typing import ClassVar

from tpu_experiments.config.fields import number
from tpu_experiments.config.objectives.base import ObjectiveConfig


@dataclass
class MaskedConfig(ObjectiveConfig):
    """Masked tokens from the rest of their document, for encoders (BERT, arXiv 1810.04805)."""

    _target_: str = "tpu_experiments.objectives.masked.Masked"
    trains_encoders: ClassVar[bool] = True
    mask_rate: float = number(default=0.15, above=0, below=1)
    """Share of the tokens that are chosen and predicted (BERT 0.15, ModernBERT 0.3); special tokens never are."""
    replace_mask: float = number(default=0.8, at_least=0, at_most=1)
    """Share of the chosen tokens that are replaced by the mask token."""
    replace_random: float = number(default=0.1, at_least=0, at_most=1)
    """Share of the chosen tokens that are replaced by a random token; the rest stay as they are."""
    mask_token: str | None = None
    """Token that stands for a masked one where the tokenizer has no mask token of its own: a reserved one, that no text
    contains."""
    whole_word: bool = False
    """The tokens of a word are chosen together, by one draw with `mask_rate` (BERT's whole-word masking); what replaces
    each is drawn by itself. The vocabulary must mark where words begin: by ##, U+2581 or a byte-level blank."""
