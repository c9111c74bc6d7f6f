"""`model.attention=flash`: attention by the device's fused kernel, or by sdpa where it has none.

Registered in transformers' attention table, so that most models can use it. In place of a mask, the model receives the
segment ids of its tokens, as (B, 1, 1, T) where a token attends to those before it alone, as (B, 1, T, 1) where it
attends to both sides: transformers passes a four-dimensional mask to every layer unchanged, whether the model has one
type of layer or several. Legend: B rows, H query heads, K key/value heads, T tokens, D head dimension.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.models.parts.rope import FLASH, pending_rotation
from tpu_experiments.runtime.kernels.attention import Scores, attention, has_attention_kernel

WITHOUT_EFFECT = ("position_ids", "cache_position", "use_cache")
"""Arguments that transformers passes for other implementations and that are ignored here: positions are already in the
rotated queries and keys, and nothing is cached."""


def causal_mask(segments_BT: Tensor, *, window: int | None) -> Tensor:
    """Return the boolean mask (B, 1, T, T), true where a token may attend.

    Attention is causal, within the token's segment and within the window. Padding (segment 0) attends to padding only,
    so that no row of the softmax is empty.
    """
    index_T = torch.arange(segments_BT.shape[1], device=segments_BT.device)
    distance_TT = index_T[:, None] - index_T[None, :]
    same_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
    full = (same_BTT & (distance_TT >= 0))[:, None]
    return full & (distance_TT < window) if window else full


def same_chunk(segments_BT: Tensor, *, size: int) -> Tensor:
    """Return the boolean mask (B, 1, T, T) of Llama 4: true between tokens of the same chunk of a document.

    Chunks of `size` tokens are counted from a document's first token on.
    """
    index_T = torch.arange(segments_BT.shape[1], device=segments_BT.device)
    same_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
    position_BT = (same_BTT & (index_T[:, None] > index_T[None, :])).sum(-1, dtype=torch.int32)
    chunk_BT = torch.div(position_BT, size, rounding_mode="floor")
    return (chunk_BT[:, :, None] == chunk_BT[:, None, :])[:, None]


def bidirectional_mask(segments_BT: Tensor, *, window: int | None) -> Tensor:
    """Return the boolean mask (B, 1, T, T) of an encoder, true where a token may attend: its segment, on both sides.

    Padding attends to padding only, as in `causal_mask`.

    Args:
        window: largest distance, itself included, as transformers' encoders count it: ModernBERT's is half of its
            `local_attention`.
    """
    index_T = torch.arange(segments_BT.shape[1], device=segments_BT.device)
    same_BTT = (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None]
    if window is None:
        return same_BTT
    return same_BTT & ((index_T[:, None] - index_T[None, :]).abs() <= window)


def flash(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute one layer's attention, with the signature that transformers calls.

    Args:
        query: (B, H, T, D); key and value are (B, K, T, D), not repeated to H heads.
        attention_mask: segment ids (B, 1, 1, T) or (B, 1, T, 1), in any data type that holds them.
        sliding_window: a token attends to keys at a distance below it; of a decoder that attends to both sides, up to
            it, as far as encoders count theirs (`bidirectional_mask`).
        softcap: c; scores become c tanh(score / c).
        others: further arguments of transformers; accepted only where they do not change the result.

    Returns:
        The output (B, T, H, D), and None in place of attention weights.

    Raises:
        ConfigError: the model asks for something that is not computed here, such as attention sinks, or, on a device
            with a kernel, dropout of the weights.
    """
    causal, is_decoder = attention_mask.shape[2] == 1, getattr(module, "is_causal", True) is not False
    require_known(module, others, causal=causal)
    segments_BT = attention_mask.flatten(1).to(torch.int32)
    if sliding_window and is_decoder and not causal:
        sliding_window += 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if has_attention_kernel():
        if dropout:
            raise ConfigError(
                f"model.attention=flash; the model's config has dropout={dropout:g} of the weights of attention, which "
                "the TPU's kernel does not compute; use model.attention=sdpa, or set it to 0 in the config."
            )
        scores, heads = Scores(scale, sliding_window, softcap, causal), query.shape[1]
        rotation, features = pending_rotation(query, key), value.shape[-1]
        if features != query.shape[-1]:
            query, key, value = of_one_width(query, key, value)
        flat = [tensor.transpose(1, 2).flatten(2) for tensor in (query, key, value)]
        out = attention(*flat, segments=segments_BT, rotation=rotation, heads=heads, scores=scores)
        out_BTHD = out.unflatten(2, (heads, -1))
        return out_BTHD if features == query.shape[-1] else out_BTHD[..., :features], None
    if causal:
        mask = causal_mask(segments_BT, window=sliding_window)
    else:
        mask = bidirectional_mask(segments_BT, window=sliding_window - 1 if sliding_window else None)
    if softcap is None:
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scale)
    return _capped(query, key, value, mask=mask, scale=scale, soft_cap=softcap, dropout=dropout), None


def of_one_width(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return the tensors (B, N, T, D) with zeros behind the features of those that are narrower than the others.

    The kernel has one width. Zeros change no score, and come out as zeros (DeepSeek's values are narrower than its
    queries and keys).
    """
    width = max(query.shape[-1], value.shape[-1])
    return [F.pad(tensor, (0, width - tensor.shape[-1])) for tensor in (query, key, value)]


def require_known(module: nn.Module, others: Mapping[str, Any], *, causal: bool) -> None:
    """Refuse by name any option that would change the result and is not computed here.

    None and False ask for nothing, except `is_causal=False` where attention is causal.

    Raises:
        ConfigError: there is such an option.
    """
    unknown = [name for name, value in others.items() if name not in WITHOUT_EFFECT and value is not None]
    unknown = [name for name in unknown if others[name] is not False or (name == "is_causal" and causal)]
    if causal and getattr(module, "is_causal", True) is False and "is_causal" not in unknown:
        unknown.append("is_causal")
    if unknown:
        raise ConfigError(
            f"model.attention=flash; {type(module).__name__} asks for {', '.join(sorted(unknown))}, which it does not "
            "compute; use model.attention=eager."
        )


def _capped(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor, scale: float, soft_cap: float, dropout: float
) -> Tensor:
    """Compute attention with soft-capped scores in plain torch, since sdpa has none; returns (B, T, H, D)."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ repeat_kv(key, groups).transpose(2, 3) * scale
    scores = (soft_cap * torch.tanh(scores / soft_cap)).masked_fill(~mask, torch.finfo(query.dtype).min)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout)
    return (weights @ repeat_kv(value, groups)).transpose(1, 2).contiguous()


ALL_ATTENTION_FUNCTIONS.register(FLASH, flash)
DECODE = "decode"


def decode(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute one layer's attention of one token to a cache, with the signature that transformers calls.

    sdpa's decomposition on XLA multiplies all keys by the root of the scale: for Qwen2.5 0.5B on v5e (64 rows, 1,024
    slots) it took 11 of 15 ms a token (planned). Here the query alone is scaled, and no head is repeated.

    Args:
        query: (B, H, 1, D), key and value (B, K, S, D); of more tokens sdpa is computed.
        attention_mask: boolean (B, 1, 1, S), true where the token attends.
        softcap: c; scores become c tanh(score / c).

    Returns:
        The output (B, 1, H, D), and None in place of attention weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.shape[2] > 1 or position_bias is not None:
        if softcap is not None:
            return _capped(query, key, value, mask=attention_mask, scale=scale, soft_cap=softcap, dropout=0.0), None
        more = {"position_bias": position_bias, **others} if position_bias is not None else others
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scale, **more)
    grouped = (query[:, :, 0] * scale).unflatten(1, (key.shape[1], -1))
    scores = torch.einsum("bkgd,bksd->bkgs", grouped, key).float()
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores.masked_fill(~attention_mask, torch.finfo(torch.float32).min), -1)
    out = torch.einsum("bkgs,bksd->bkgd", weights.to(value.dtype), value)
    return out.flatten(1, 2)[:, None], None


ALL_ATTENTION_FUNCTIONS.register(DECODE, decode)
