"""Keys and values of past tokens in tensors of one shape, in the place of transformers' cache.

Every layer keeps every token, those that slide too: their window is in the mask. So all rows write at one slot, and a
program of one shape serves every length. Legend: B rows, K key/value heads, T tokens, S slots, D head dimension.
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
    """Takes the keys and values of whole prompts (B, K, T, D) and hands them back as they are."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What a layer of transformers calls; (B, K, S, D) is kept."""
        empty = (0, 0, 0, self.num_slots - key.shape[2])
        self.layers[layer_idx] = (F.pad(key, empty), F.pad(value, empty))
        return key, value

    def get_seq_length(self, *_: Any) -> int:
        """Tokens before the ones that are computed."""
        return 0


class FilledCache:
    """Writes the key and value of one token into its slot and hands back all slots.

    Args:
        layers: keys and values (B, K, S, D), written in place.
        slot: of the token, (1,).
    """

    def __init__(self, layers: list[tuple[Tensor, Tensor]], *, slot: Tensor) -> None:
        self.layers, self.slot = layers, slot.long()

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What a layer of transformers calls."""
        keys, values = self.layers[layer_idx]
        return keys.index_copy_(2, self.slot, key), values.index_copy_(2, self.slot, value)

    def get_seq_length(self, *_: Any) -> int:
        """All slots; positions and masks are given to the model, so it has no use for it."""
        return int(self.layers[0][0].shape[2])


def slot_masks(pads_B: Tensor, *, slot: Tensor, num_slots: int, module: nn.Module) -> Any:
    """What the model takes as `attention_mask` for the token in `slot` (1,): of each row the slots that it sees.

    Rows begin after `pads_B` slots of padding. Boolean (B, 1, 1, S), one for each type of layer where the model has
    types, in the form of the module's attention.
    """
    index_S = torch.arange(num_slots, device=pads_B.device, dtype=torch.int32)
    full = ((index_S >= pads_B[:, None]) & (index_S <= slot))[:, None, None]

    def mask_of(window: int | None) -> Tensor:
        return full & (index_S > slot - window) if window else full

    return in_its_form(by_layer_type(mask_of, config=module.config), module)


@contextmanager
def kernel_left_out(module: nn.Module) -> Iterator[None]:
    """Inside, a model with `model.attention=flash` attends as transformers does: the kernel knows whole rows only."""
    config: Any = module.config
    chosen = config._attn_implementation
    if chosen == FLASH:  # sdpa does not cap scores (Gemma 2)
        config._attn_implementation = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = chosen
