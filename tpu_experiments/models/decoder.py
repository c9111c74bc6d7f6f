"""The text decoder of a multimodal model (Gemma 3 from 4B on): its config and its parameter names.

The vision and audio parts are neither loaded nor trained: a language model is fine-tuned on text here.
"""

from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def decoder_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the text decoder; the same object where the model is nothing else."""
    text = config.get_text_config(decoder=True)
    is_part = text.model_type != config.model_type and text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return text if is_part else config


def prefixes(decoder: PreTrainedModel, whole: PreTrainedModel) -> tuple[str, str]:
    """Return the prefix of layer names in a decoder, and in the multimodal model that contains it.

    Raises:
        LookupError: the model contains no module of the decoder's class.
    """
    kind = type(decoder.base_model)
    outer = [name for name, part in whole.named_modules() if type(part) is kind]
    if not outer:
        raise LookupError(f"{type(whole).__name__} has no {kind.__name__}")
    inner = decoder.base_model_prefix
    return (f"{inner}.", f"{outer[0]}.") if outer[0] else ("", "")
