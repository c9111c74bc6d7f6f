"""AdamW (arXiv 1711.05101) as a pure function; equal to torch.optim.AdamW, tested."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tpu_experiments.optim.base import Named, State


class AdamW:
    """AdamW with float32 moments."""

    def __init__(self, *, beta1: float, beta2: float, eps: float) -> None:
        self.beta1, self.beta2, self.eps = beta1, beta2, eps

    def init(self, parameters: Named) -> State:
        state: State = {"": {"count": torch.zeros(1)}}
        for name, p in parameters.items():
            state[name] = {slot: torch.zeros_like(p, dtype=torch.float32) for slot in ("first", "second")}
        return state

    def update(
        self, parameters: Named, grads: Named, state: State, *, lr: Tensor, decay: Mapping[str, float]
    ) -> tuple[dict[str, Tensor], State]:
        count = state[""]["count"] + 1
        correction1, correction2 = 1 - self.beta1**count, 1 - self.beta2**count
        new_parameters: dict[str, Tensor] = {}
        new_state: State = {"": {"count": count}}
        for name, p in parameters.items():
            g = grads[name]
            first = self.beta1 * state[name]["first"] + (1 - self.beta1) * g
            second = self.beta2 * state[name]["second"] + (1 - self.beta2) * g.square()
            step = (first / correction1) / ((second / correction2).sqrt() + self.eps)
            new_parameters[name] = p - lr * (step + decay[name] * p)
            new_state[name] = {"first": first, "second": second}
        return new_parameters, new_state
