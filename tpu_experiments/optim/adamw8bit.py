"""AdamW with block-wise 8-bit moments (arXiv 2110.02861) as a pure function.

Codes, blocks and update are those of bitsandbytes' AdamW8bit, tested, with one difference. A second moment below 1.6e-7
of its block's largest is rounded to 0, and the first moment over 0 + eps is a step of any size: in an embedding, some
elements moved by up to 123 learning rates at the second step of a tiny model. Here such a moment is read as 1e-7 of the
block's largest, between 0 and the next value, and steps stay within 1.3 times those that exact moments allow.
(bitsandbytes' users keep embeddings in 32 bits instead.)
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tpu_experiments.config.schema import MIN_ELEMENTS
from tpu_experiments.optim.adamw import AdamW
from tpu_experiments.optim.base import Named, State
from tpu_experiments.optim.blockwise import absmax_shape, decoded_slot, encoded
from tpu_experiments.runtime.sharding import ABSMAX
from tpu_experiments.runtime.stacked import is_stack

MOMENTS = {"first": True, "second": False}
"""Slots, and whether their values have a sign."""


class AdamW8bit(AdamW):
    """AdamW whose moments are stored as a byte per element and a float32 absmax per block of 256.

    The arithmetic is AdamW's, in float32.
    """

    def init(self, parameters: Named) -> State:
        small = {name: p for name, p in parameters.items() if not _in_8_bits(name, p)}
        state = super().init(small)
        for name, p in parameters.items():
            if name in small:
                continue
            blocks = absmax_shape(tuple(p.shape), is_stack=is_stack(name))
            state[name] = {
                slot: tensor
                for moment in MOMENTS
                for slot, tensor in (
                    (moment, torch.zeros(p.shape, dtype=torch.uint8, device=p.device)),
                    (moment + ABSMAX, torch.zeros(blocks, device=p.device)),
                )
            }
        return state

    def update(
        self, parameters: Named, grads: Named, state: State, *, lr: Tensor, decay: Mapping[str, float]
    ) -> tuple[dict[str, Tensor], State]:
        new_parameters: dict[str, Tensor] = {}
        new_state: State = {"": {"count": state[""]["count"] + 1}}
        for name, p in parameters.items():  # one by one: float32 moments of one parameter exist at a time
            moments = {slot: decoded_slot(state[name], slot, signed=signed) for slot, signed in MOMENTS.items()}
            moved, made = super().update({name: p}, grads, {"": state[""], name: moments}, lr=lr, decay=decay)
            new_parameters |= moved
            new_state[name] = made[name]
            if _in_8_bits(name, p):
                new_state[name] = {}
                for slot, signed in MOMENTS.items():
                    codes, absmax = encoded(made[name][slot], signed=signed, is_stack=is_stack(name))
                    new_state[name] |= {slot: codes, slot + ABSMAX: absmax}
        return new_parameters, new_state


def _in_8_bits(name: str, parameter: Tensor) -> bool:
    layers = parameter.shape[0] if is_stack(name) else 1
    return parameter.numel() // layers >= MIN_ELEMENTS
