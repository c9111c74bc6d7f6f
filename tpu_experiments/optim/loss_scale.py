"""Dynamic loss scale of float16 training (arXiv 1710.03740), kept in the optimizer's state.

Gradients of activations below 6e-8 are 0 in float16 and those above 65,504 infinite. The loss is multiplied by the
largest power of two at which no gradient overflows; the float32 gradients of the parameters are divided by it. The
device decides, without a host read, and a checkpoint holds the scale as it holds the moments.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tpu_experiments.optim.base import State

FIRST = 2.0**16
"""Scale of the first step."""
LEAST = 1.0
"""Below it the gradient itself is too large."""
GROWTH_STEPS = 2000
"""Updates in a row after which the scale is doubled."""
SCALE, GOOD = "loss_scale", "good_steps"
"""Slots of the entry `""`, shape (1,). A scale of 0, the initial state of every slot, stands for `FIRST`."""


def scale_of(state: State) -> Tensor | None:
    """Return the loss scale of the next step, shape (); None where the loss is not scaled."""
    stored = state[""].get(SCALE) if "" in state else None
    return None if stored is None else torch.where(stored == 0, FIRST, stored).view(())


def adapted(slots: Mapping[str, Tensor], *, scale: Tensor, is_finite: Tensor, overflowed: Tensor) -> dict[str, Tensor]:
    """Return the scale's slots after a step.

    Args:
        slots: before the step.
        is_finite: whether the step was applied.
        overflowed: whether the gradient was not finite and the loss was.
    """
    good = torch.where(is_finite, slots[GOOD] + 1, torch.where(overflowed, 0.0, slots[GOOD]))
    is_due = good >= GROWTH_STEPS
    grown = torch.where(is_due, scale * 2, scale)
    halved = torch.clamp(scale / 2, min=LEAST)
    return {SCALE: torch.where(overflowed, halved, grown), GOOD: torch.where(is_due, 0.0, good)}
