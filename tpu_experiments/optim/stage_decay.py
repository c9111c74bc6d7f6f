"""Weight decay that changes from stage to stage, around any optimizer: a tensor of the state, which the step sets.

A number would be part of the compiled step, so that each stage would compile its own program. The update is that of the
optimizer without weight decay, less lr * decay * p of every matrix, which is what AdamW and Adafactor compute
themselves.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tpu_experiments.optim.base import Named, Optimizer, State, own_ndim
from tpu_experiments.optim.decay_groups import is_matched

DECAY = "weight_decay"
"""Slot of the entry `""`, shape (1,), and key of the stage's decay in a batch."""


class StageDecay:
    """An optimizer without weight decay of its own, and decay by the value in its state."""

    def __init__(self, optimizer: Optimizer, *, no_decay: Sequence[str] = ()) -> None:
        """Take the optimizer, and patterns of the names of matrices that do not decay either."""
        self.optimizer, self.no_decay = optimizer, no_decay

    def init(self, parameters: Named) -> State:
        """Return the optimizer's zero state and the decay's."""
        state = self.optimizer.init(parameters)
        return {**state, "": {**state[""], DECAY: torch.zeros(1)}}

    def update(self, parameters: Named, grads: Named, state: State, *, lr: Tensor) -> tuple[dict[str, Tensor], State]:
        """Update by the optimizer, then let matrices decay."""
        decay = state[""][DECAY]
        own = {slot: tensor for slot, tensor in state[""].items() if slot != DECAY}
        new_parameters, new_state = self.optimizer.update(parameters, grads, {**state, "": own}, lr=lr)
        for name, p in parameters.items():
            if own_ndim(name, p) > 1 and not is_matched(name, self.no_decay):
                new_parameters[name] = new_parameters[name] - lr * decay * p
        return new_parameters, {**new_state, "": {**new_state[""], DECAY: decay}}


def with_decay(state: State, decay: Tensor) -> State:
    """Return the state with this decay, shape (1,), for the next update."""
    return {**state, "": {**state[""], DECAY: decay}}
