"""Keys and values of past tokens in tensors of a static shape, in place of transformers' cache.

Every layer keeps every token, also those with a sliding window, which the mask applies. So all rows write to the same
slot, and a program of one shape serves every length. Legend: B rows, K key/value heads, T tokens, S slots, D head
dimension.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpu_experiments.models.attention import FLASH
from tpu_experiments.models.forward import by_layer_type, in_its_form


class FreshCache:
    """Collects the keys and values of whole prompts (B, K, T, D) and returns them unchanged."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values, padded to (B, K, S, D); transformers' layers call it."""
        empty = (0, 0, 0, self.num_slots - key.shape[2])
        self.layers[layer_idx] = (F.pad(key, empty), F.pad(value, empty))
        return key, value

    def get_seq_length(self, *_: Any) -> int:
        """Return the number of tokens before those being computed, which is 0."""
        return 0


class FilledCache:
    """Writes the key and value of one token into its slot and returns all slots.

    Args:
        layers: keys and values (B, K, S, D), written in place.
        slot: number of the token's slot, (1,).
    """

    def __init__(self, layers: list[tuple[Tensor, Tensor]], *, slot: Tensor) -> None:
        self.layers, self.slot = layers, slot.long()

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write a layer's key and value of one token and return all slots; transformers' layers call it."""
        keys, values = self.layers[layer_idx]
        return keys.index_copy_(2, self.slot, key), values.index_copy_(2, self.slot, value)

    def get_seq_length(self, *_: Any) -> int:
        """Return the number of slots; unused by the model, which is given positions and masks."""
        return int(self.layers[0][0].shape[2])


def slot_masks(pads_B: Tensor, *, slot: Tensor, num_slots: int, module: nn.Module) -> Any:
    """Return the model's `attention_mask` for the token in `slot` (1,): the slots it attends to per row.

    Rows begin after `pads_B` slots of padding. Boolean (B, 1, 1, S), one for each type of layer where the model has
    types, in the form that the module's attention expects.
    """
    index_S = torch.arange(num_slots, device=pads_B.device, dtype=torch.int32)
    full = ((index_S >= pads_B[:, None]) & (index_S <= slot))[:, None, None]

    def mask_of(window: int | None) -> Tensor:
        return full & (index_S > slot - window) if window else full

    return in_its_form(by_layer_type(mask_of, config=module.config), module)


@contextmanager
def kernel_left_out(module: nn.Module) -> Iterator[None]:
    """Replace the attention kernel by sdpa or eager attention inside the block.

    The kernel of `model.attention=flash` takes whole rows only.
    """
    config: Any = module.config
    chosen = config._attn_implementation
    if chosen == FLASH:  # sdpa has no soft cap of scores (Gemma 2)
        config._attn_implementation = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = chosen
