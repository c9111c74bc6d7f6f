"""What an optimizer of this project is: two pure functions over named tensors.

An update is part of the compiled step, so nothing in it is a Python number that changes: the step count is a tensor
of the state and the learning rate an input. (torch.optim bakes the step into the graph or reads it on the host.)
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from tpu_experiments.runtime.stacked import is_stack

Named = Mapping[str, Tensor]
State = dict[str, dict[str, Tensor]]
"""Parameter name to slot name to tensor; the entry `""` holds `count`, the number of updates so far, shape (1,)."""


def own_ndim(name: str, tensor: Tensor) -> int:
    """Dimensions of a parameter without the axis of layers that a stack has in front."""
    return tensor.ndim - is_stack(name)


class Optimizer(Protocol):
    """Swap point `optim._target_`."""

    def init(self, parameters: Named) -> State:
        """Zero state, float32, where the parameters are: on the meta device it has shapes alone."""

    def update(self, parameters: Named, grads: Named, state: State, *, lr: Tensor) -> tuple[dict[str, Tensor], State]:
        """New parameters and new state; `lr` has shape (1,)."""


def global_norm(grads: Named) -> Tensor:
    """Euclidean norm over all gradients, shape ()."""
    return torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()


def clip(grads: Named, *, norm: Tensor, limit: float | None) -> Named:
    """Scale all gradients so that their global norm is at most `limit` (as torch.nn.utils.clip_grad_norm_)."""
    if limit is None:
        return grads
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    return {name: g * factor for name, g in grads.items()}
