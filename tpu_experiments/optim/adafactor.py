"""Adafactor (arXiv 1804.04235) as a pure function.

It has factored second moments, update clipping and a relative step size, and follows torch.optim.Adafactor (external
learning rate, no first moment); equal to it, tested.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tpu_experiments.optim.base import Named, State, own_ndim

# eps1 = 1e-30 squared is 0 in float32, and a zero gradient (of A at the first step, where B is zero) would give 0/0.
TINY = torch.finfo(torch.float32).tiny


class Adafactor:
    """Adafactor with float32 state: a row and a column of a matrix, the full second moment of a vector."""

    def __init__(self, *, beta2_decay: float, eps1: float, eps2: float, clip_threshold: float) -> None:
        self.beta2_decay, self.eps1, self.eps2, self.clip_threshold = beta2_decay, eps1, eps2, clip_threshold

    def init(self, parameters: Named) -> State:
        state: State = {"": {"count": torch.zeros(1)}}
        for name, p in parameters.items():
            shape = tuple(p.shape)
            if own_ndim(name, p) > 1:
                row, column = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
                state[name] = {
                    "row": torch.zeros(row, device=p.device),
                    "column": torch.zeros(column, device=p.device),
                }
            else:
                state[name] = {"variance": torch.zeros(shape, device=p.device)}
        return state

    def update(
        self, parameters: Named, grads: Named, state: State, *, lr: Tensor, decay: Mapping[str, float]
    ) -> tuple[dict[str, Tensor], State]:
        count = state[""]["count"] + 1
        keep = 1 - count**self.beta2_decay
        rho = torch.minimum(lr, 1 / count.sqrt())
        new_parameters: dict[str, Tensor] = {}
        new_state: State = {"": {"count": count}}
        for name, p in parameters.items():
            # A stack counts as one parameter per layer: each layer has its own row, column and root mean square.
            dims = tuple(range(p.ndim - own_ndim(name, p), p.ndim))
            variance, new_state[name] = self._variance(grads[name], state[name], keep=keep)
            update = grads[name] / variance.clamp(min=max(self.eps1**2, TINY)).sqrt()
            clipped = torch.clamp(_rms(update, dims) / self.clip_threshold, min=1.0)
            alpha = torch.clamp(_rms(p, dims), min=self.eps2) * rho
            new_parameters[name] = p * (1 - lr * decay[name]) - alpha / clipped * update
        return new_parameters, new_state

    def _variance(self, grad: Tensor, state: dict[str, Tensor], *, keep: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        squared = grad.square()
        if "variance" in state:
            variance = keep * state["variance"] + (1 - keep) * squared
            return variance, {"variance": variance}
        row = keep * state["row"] + (1 - keep) * squared.mean(-1, keepdim=True)
        column = keep * state["column"] + (1 - keep) * squared.mean(-2, keepdim=True)
        # Not `row @ column`: a TPU rounds the factors of a matrix product to bf16.
        return row * column / row.mean(-2, keepdim=True).clamp(min=self.eps1), {"row": row, "column": column}


def _rms(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.square().mean(dims, keepdim=True).sqrt()
