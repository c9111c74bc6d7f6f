"""The decoder of text in a model that sees or hears as well (Gemma 3 from 4B on): its config and its names.

The other parts are neither loaded nor trained: a language model is fine-tuned on text here.
"""

from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def decoder_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the decoder; the same object where the model is nothing else."""
    text = config.get_text_config(decoder=True)
    is_part = text.model_type != config.model_type and text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return text if is_part else config


def prefixes(decoder: PreTrainedModel, whole: PreTrainedModel) -> tuple[str, str]:
    """How the names of the layers begin in a decoder, and in the model that it is a part of.

    Raises:
        LookupError: the model has no part of the decoder's class.
    """
    kind = type(decoder.base_model)
    outer = [name for name, part in whole.named_modules() if type(part) is kind]
    if not outer:
        raise LookupError(f"{type(whole).__name__} has no {kind.__name__}")
    inner = decoder.base_model_prefix
    return (f"{inner}.", f"{outer[0]}.") if outer[0] else ("", "")
