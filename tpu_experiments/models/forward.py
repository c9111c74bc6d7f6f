"""The forward pass of training, evaluation and generation, with masks that need no read on the host.

transformers builds masks by testing tensor values, which on XLA is a read by the host in every step (measured); a
ready-made 4-D mask is passed through unchanged. Legend: B rows, T tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from tpu_experiments.models.attention import FLASH, causal_mask
from tpu_experiments.models.dropout import NOISE, noise
from tpu_experiments.models.float32_gradients import cast_weights
from tpu_experiments.models.turning import computed
from tpu_experiments.runtime.stacked import is_stack


def attention_masks(segments_BT: Tensor, *, config: Any) -> Tensor | dict[str, Tensor]:
    """Return boolean masks (B, 1, T, T), true where a token may attend.

    Attention is causal, within the token's document and within the window. Padding (segment 0) attends to padding only,
    so that no row of the softmax is empty. Models with `layer_types` (Gemma 3, Qwen2) take one mask per type; Mistral
    takes one mask with its window.
    """
    return by_layer_type(lambda window: causal_mask(segments_BT, window=window), config=config)


def by_layer_type(mask_of: Callable[[int | None], Tensor], *, config: Any) -> Tensor | dict[str, Tensor]:
    """Return the mask of a model, or one for each type of its layers.

    `mask_of` makes a mask for a window, or for None.
    """
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return mask_of(window)
    masks = {"full_attention": mask_of(None)}
    if "sliding_attention" in layer_types:
        masks["sliding_attention"] = mask_of(window)
    return masks


def logits_of(module: nn.Module, parameters: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """Return logits (B, T, V), with `parameters` in the module's data type in place of its own.

    The gradients of `parameters` are float32, not rounded on the way (models/float32_gradients.py).

    Args:
        parameters: float32 trainable parameters by name.
        batch: `ids`, `positions`, `segments`, all (B, T); `noise` (B,) where adapters have dropout.
    """
    dtype: Any = module.dtype
    inputs = _inputs(module, batch)
    with noise(batch.get(NOISE)), _as_used(parameters, dtype=dtype) as cast:
        return computed(module, lambda: functional_call(module, cast, kwargs=inputs, tie_weights=True).logits)


def hidden_of(
    module: nn.Module, parameters: Mapping[str, Tensor], batch: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the last hidden states (B, T, H) and the head's weight (V, H); arguments as in `logits_of`.

    The product of the two, soft-capped where the model caps, equals `logits_of` for a module with a plain head
    (`models/head.py`) and for no other. A trained embedding that is tied to the head is returned as the head. A trained
    head is float32, as in `parameters`: cast it to the data type of the hidden states for the product.
    """
    dtype: Any = module.dtype
    inputs, without_head = _inputs(module, batch), _WithoutHead(module)
    with noise(batch.get(NOISE)), _as_used(parameters, dtype=dtype) as cast:
        own = {f"module.{name}": tensor for name, tensor in cast.items()}
        hidden_BTH, head_VH = computed(
            module, lambda: functional_call(without_head, own, kwargs=inputs, tie_weights=True)
        )
    trained = next((parameters[name] for name, tensor in cast.items() if tensor is head_VH), head_VH)
    return hidden_BTH, trained


@contextmanager
def _as_used(parameters: Mapping[str, Tensor], *, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Yield the parameters in the data type in which the module is called.

    Stacks are left as they are and cast where their layers run (models/fold.py).
    """
    stacks = {name: p for name, p in parameters.items() if is_stack(name)}
    with cast_weights({n: p for n, p in parameters.items() if n not in stacks}, dtype=dtype) as cast:
        yield cast | stacks


class _WithoutHead(nn.Module):
    """A causal language model up to its head, which holds the whole, so that functional_call ties weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        whole: Any = self.module
        hidden_BTH = getattr(whole, whole.base_model_prefix)(**inputs).last_hidden_state
        return hidden_BTH, whole.get_output_embeddings().weight


def _inputs(module: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "input_ids": batch["ids"],
        "position_ids": batch["positions"],
        "attention_mask": attention_input(batch["segments"], module=module),
        "use_cache": False,
    }


def attention_input(segments_BT: Tensor, *, module: nn.Module) -> Any:
    """Return the model's `attention_mask`: segment ids for `flash`, masks for other implementations."""
    config: Any = module.config
    if config._attn_implementation == FLASH:
        return segments_BT[:, None, None, :]
    return in_its_form(attention_masks(segments_BT, config=config), module)


def in_its_form(masks: Tensor | dict[str, Tensor], module: nn.Module) -> Any:
    """Convert boolean masks to the form that the module's attention expects.

    sdpa takes the boolean mask; transformers' eager attention adds its mask to the scores: 0, or the lowest finite
    value.
    """
    config: Any = module.config
    if config._attn_implementation != "eager":
        return masks
    if isinstance(masks, dict):
        return {kind: in_its_form(mask, module) for kind, mask in masks.items()}
    dtype: Any = module.dtype
    return torch.where(masks, 0.0, torch.finfo(dtype).min).to(dtype)


def target_weights(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return next-token targets (B, T) and their float32 weights (B, T).

    A weight is 1 where the target is to be learnt and of the same document, otherwise 0.
    """
    targets_BT = torch.roll(batch["ids"], -1, dims=1)
    next_learn = torch.roll(batch["learn"], -1, dims=1)
    same = torch.roll(batch["segments"], -1, dims=1) == batch["segments"]
    weights_BT = (next_learn * same * (batch["segments"] > 0)).to(torch.float32)
    inside = torch.arange(targets_BT.shape[1], device=targets_BT.device) < targets_BT.shape[1] - 1
    return targets_BT, weights_BT * inside


def row_losses(logits_BTV: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the weighted cross-entropy sum (nats) and the weight sum of every row, both (B,) float32."""
    targets_BT, weights_BT = target_weights(batch)
    losses = F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten().long(), reduction="none")
    return (losses.view_as(weights_BT) * weights_BT).sum(1), weights_BT.sum(1)
