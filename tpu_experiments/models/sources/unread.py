"""Tensors of a checkpoint that a model does not read: each is of a known kind, or stops the run by its name.

transformers warns of such tensors and goes on. Most are harmless: copies of tied weights, tables that are computed, the
part of a multimodal model that sees or hears. Others say that the model is not what its config.json says: biases, more
layers, an adapter, scales of quantised weights. What would be trained is then another model than that of the files."""

import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.models.sources.conversion import AnyStored, ConvertedTensor, read_any

log = logging.getLogger(__name__)
Stored = AnyStored | ConvertedTensor
COMPUTED = re.compile(r"(^|\.)(position_ids|token_type_ids|inv_freq|original_inv_freq|masked_bias|causal_mask)$")
"""Names of tables that checkpoints of older versions hold and that every version computes."""
MASK = re.compile(r"attn\.bias$|attention\.bias$|attn\.attention\.bias$")
"""Names of causal masks (1, 1, T, T) of GPT-2's descendants in older versions; biases of projections are vectors."""
OTHER_HEADS = re.compile(r"(^|\.)pooler\.")
"""Names inside of a base model that belong to a head of an encoder."""
REASONS = (
    (re.compile(r"(^|\.)(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|base_layer|modules_to_save)(\.|$)"),
     "they are of an adapter: merge it into the weights with PEFT's merge_and_unload first"),
    (re.compile(r"(\.|_)(SCB|weight_format|qweight|qzeros|scales|g_idx|weight_scale\w*|weight_packed|weight_shape|absmax|"
                r"quant_map|nested_absmax|nested_quant_map|quant_state\S*|input_scale|output_scale|scale_inv)$"),
     "they are of quantised weights, of which config.json has no quantization_config: take the checkpoint in float"),
)  # fmt: skip
"""What names tell of their origin, and what to do."""
_said: set[str] = set()


def require_known(
    found: Mapping[str, Stored],
    *,
    used: Collection[str],
    twins: Mapping[str, str],
    whole: nn.Module,
    is_part: bool,
    other_heads: str | None,
    origin: str,
) -> None:
    """Require every tensor of a checkpoint to be used or of a known kind; what is left out is logged in one line.

    Args:
        found: the checkpoint's tensors under their names in `whole`.
        used: names that the trained model reads.
        twins: names of further copies of tied weights, and which of `used` each is a copy of.
        whole: the checkpoint's model on the meta device, which may see or hear as well.
        is_part: whether a decoder out of `whole` is trained.
        other_heads: for a model that checkpoints of other heads hold as well, the prefix of its base model's names.

    Raises:
        ConfigError: tensors have no place in the model, or a copy differs from its twin.
    """
    kinds: dict[str, list[str]] = defaultdict(list)
    unknown: list[str] = []
    seen, computed = set(whole.state_dict()) if is_part else set(), {name for name, _ in whole.named_buffers()}
    ignored = getattr(whole, "_keys_to_ignore_on_load_unexpected", None) or ()
    for name in found:
        if name in used:
            continue
        if name in twins:
            _require_equal(found, name, twins[name], origin=origin)
            kinds["that are copies of tied weights"].append(name)
        elif name in seen:
            kinds["of the part that sees or hears"].append(name)
        elif name in computed or is_table(name, found[name].shape):
            kinds["that are computed from the config"].append(name)
        elif any(re.search(pattern, name) for pattern in ignored):
            kinds[f"that transformers' {type(whole).__name__} leaves out"].append(name)
        elif other_heads is not None and (not name.startswith(other_heads) or OTHER_HEADS.search(name)):
            kinds["of another head"].append(name)
        else:
            unknown.append(name)
    if unknown:
        raise ConfigError(_refusal(unknown, whole, origin=origin))
    if kinds:
        texts = [f"{len(names)} {kind} ({_size(found[n] for n in names)}, first {names[0]})" for kind, names in
                 kinds.items()]  # fmt: skip
        text = f"{origin}: of the checkpoint's {len(found)} tensors these are not read: {'; '.join(texts)}"
        if text not in _said:
            _said.add(text)
            log.info("%s", text)


def is_table(name: str, shape: Collection[int]) -> bool:
    """Return whether a tensor is a table that checkpoints of older versions hold: positions, frequencies, masks."""
    return COMPUTED.search(name) is not None or (MASK.search(name) is not None and len(shape) == 4)


def _require_equal(found: Mapping[str, Stored], name: str, twin: str, *, origin: str) -> None:
    one, other = read_any(found[name]), read_any(found[twin])
    if one.shape != other.shape or not torch.equal(one, other):
        raise ConfigError(
            f"{origin}; config.json ties {name} to {twin}, and the checkpoint has them with different values; if both "
            "were trained, set tie_word_embeddings to false in its config.json; otherwise remove one of them."
        )


def _refusal(unknown: list[str], whole: nn.Module, *, origin: str) -> str:
    several = f"{len(unknown)} tensors" if len(unknown) > 1 else "1 tensor"
    reason = next((text for pattern, text in REASONS if pattern.search(unknown[0])), "")
    layers = getattr(getattr(whole, "config", None), "num_hidden_layers", None)
    number = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", unknown[0])
    if not reason and layers is not None and number is not None and int(number[1]) >= layers:
        reason = f"config.json has num_hidden_layers={layers}: give the one that belongs to these weights"
    reason = reason or (
        "give the config.json that belongs to these weights, or, where they are not part of the model, save it anew "
        "with transformers' save_pretrained, which leaves them out"
    )
    return (
        f"{origin}; the checkpoint has {several} that {type(whole).__name__} has not with its config.json, first "
        f"{unknown[0]!r}; {reason}."
    )


def _size(stored: Iterable[Stored]) -> str:
    total = sum(each.nbytes for each in stored)
    return f"{total / 1e6:,.1f} MB" if total >= 1e5 else f"{total:,} bytes"
