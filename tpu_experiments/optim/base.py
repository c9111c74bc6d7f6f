"""The Optimizer protocol: two pure functions over named tensors.

An update is part of the compiled step, so no Python number in it may change: the step count is a tensor of the state
and the learning rate an input. (torch.optim bakes the step into the graph or reads it on the host.)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tpu_experiments.runtime.stacked import is_stack

Named = Mapping[str, Tensor]
State = dict[str, dict[str, Tensor]]
"""Parameter name to slot name to tensor; the entry `""` has `count`, the number of updates so far, shape (1,)."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with a gradient clipping and a learning rate of their own, as with an optimizer of their own."""

    names: tuple[str, ...]
    clip_norm: float | None
    """Largest norm of their gradient; None does not clip."""
    rate: float = 1.0
    """Factor of the learning rate."""


def own_ndim(name: str, tensor: Tensor) -> int:
    """Return the number of dimensions of a parameter, without the leading layer axis of a stack."""
    return tensor.ndim - is_stack(name)


class Optimizer(Protocol):
    """An optimizer; the class that `optim._target_` names must implement it, and gets `optim.options` by name."""

    def init(self, parameters: Named) -> State:
        """Return the zero float32 state on the parameters' device; on the meta device it has shapes only."""

    def update(
        self, parameters: Named, grads: Named, state: State, *, lr: Tensor, decay: Mapping[str, float]
    ) -> tuple[dict[str, Tensor], State]:
        """Return the new parameters and the new state.

        Args:
            lr: learning rate of these parameters, shape (1,); others are updated by another call.
            decay: weight decay of each parameter per unit of `lr`, 0 of what does not decay.
        """


def global_norm(grads: Named) -> Tensor:
    """Return the Euclidean norm over all gradients, shape ()."""
    return torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()


def clip(grads: Named, *, norm: Tensor, limit: float | None) -> Named:
    """Scale all gradients to a global norm of at most `limit`, as torch.nn.utils.clip_grad_norm_ does.

    None leaves them unchanged.
    """
    if limit is None:
        return grads
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    return {name: g * factor for name, g in grads.items()}
