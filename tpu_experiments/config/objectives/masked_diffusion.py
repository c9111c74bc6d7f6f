"""Settings of masked diffusion."""

from dataclasses import dataclass

from tpu_experiments.config.data_schema import PrepareConfig
from tpu_experiments.config.fields import number
from tpu_experiments.config.objectives.base import ObjectiveConfig


@dataclass
class MaskedDiffusionConfig(ObjectiveConfig):
    """Masked tokens of a text at every rate of masking, for decoders without a causal mask (arXiv 2502.09992)."""

    _target_: str = "tpu_experiments.objectives.masked_diffusion.MaskedDiffusion"
    mask_token: str | None = None
    """Token that stands for a masked one where the tokenizer has no mask token of its own: a reserved one, that no text
    contains."""
    min_mask_rate: float = number(default=1e-3, above=0, below=1)
    """Smallest probability of masking: a document's is drawn between this and 1, and its loss divided by it."""
    end_padding: bool = False
    """Whether the padding behind a row's answer is learnt as end-of-sequence tokens, so that the model learns how long
    an answer is (LLaDA's fine-tuning); needs `prepare.packing=pad`."""

    def problems(self, prepare: PrepareConfig) -> list[str]:
        """Return a problem where padding is learnt and a row may hold several documents."""
        if not self.end_padding or prepare.packing == "pad":
            return []
        return [
            f"objective.end_padding=true with prepare.packing={prepare.packing}; the padding behind a row's answer "
            "is learnt where a row holds one document; use prepare.packing=pad prepare.long_documents=truncate."
        ]
