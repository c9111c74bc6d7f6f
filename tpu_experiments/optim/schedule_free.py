"""Schedule-free AdamW (arXiv 2405.15682): an average of the steps in the place of a decaying learning rate.

There are three points of every parameter: z takes the steps, x is the average of all z, weighted by the square of the
largest learning rate so far, and gradients are taken at y = (1 - beta1) z + beta1 x. Those of `schedulefree`'s
AdamWScheduleFree, tested. Training has y, the state x - y in the slot of a moving average (ema.py). So zeros are three
equal points, and evaluations, samples, exports and warm starts are of x as they are of an average.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tpu_experiments.optim.base import Named, State
from tpu_experiments.optim.ema import LAG

PEAK, WEIGHTS = "peak_lr", "sum_of_weights"
"""Slots of the entry `""`, shape (1,): the largest learning rate so far, and the sum of the squares of each step's."""
TINY = torch.finfo(torch.float32).tiny


class ScheduleFreeAdamW:
    """AdamW's steps without a first moment; `Updates` makes them those of z."""

    def __init__(self, *, beta1: float, beta2: float, eps: float) -> None:
        self.beta1, self.beta2, self.eps = beta1, beta2, eps

    def init(self, parameters: Named) -> State:
        slots = {name: {"second": torch.zeros_like(p, dtype=torch.float32)} for name, p in parameters.items()}
        return {"": {"count": torch.zeros(1)}, **slots}

    def steps(
        self, parameters: Named, grads: Named, state: State, *, lr: Tensor, decay: Mapping[str, float]
    ) -> tuple[dict[str, Tensor], State]:
        """Return the steps of z, before minus after, and the new state."""
        count = state[""]["count"] + 1
        correction = -torch.expm1(count * math.log(self.beta2))  # 1 - 0.999 in float32 is off by 5e-5 of itself
        steps: dict[str, Tensor] = {}
        new_state: State = {"": {"count": count}}
        for name, p in parameters.items():
            second = self.beta2 * state[name]["second"] + (1 - self.beta2) * grads[name].square()
            steps[name] = lr * (grads[name] / ((second / correction).sqrt() + self.eps) + decay[name] * p)
            new_state[name] = {"second": second}
        return steps, new_state

    def update(
        self, parameters: Named, grads: Named, state: State, *, lr: Tensor, decay: Mapping[str, float]
    ) -> tuple[dict[str, Tensor], State]:
        steps, new_state = self.steps(parameters, grads, state, lr=lr, decay=decay)
        return {name: p - steps[name] for name, p in parameters.items()}, new_state


def averaged(
    state: State, before: Named, steps: Named, *, lr: Tensor, beta1: float
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the new y, the new x - y, and the new slots of the entry `""`.

    With u the step of z, c the weight of the new z in x, and b beta1: z' = z - u, x' = (1 - c) x + c z',
    y' = (1 - b) z' + b x', and x - y = (1 - b) (x - z).

    Args:
        state: with the slots of before the step.
        before: y before the step.
        lr: that of the step, before factors of single parameters, shape (1,).
    """
    peak = torch.maximum(state[""][PEAK], lr)
    weights = state[""][WEIGHTS] + peak.square()
    share = peak.square() / weights.clamp(min=TINY)  # of x; 0 where no rate was above 0
    after, lags = {}, {}
    for name, y in before.items():
        lag = state[name][LAG]
        lags[name] = (1 - share) * (lag + (1 - beta1) * steps[name])
        after[name] = y - (share * (beta1 / (1 - beta1)) * lag + (1 - beta1 * (1 - share)) * steps[name])
    return after, lags, {PEAK: peak, WEIGHTS: weights}
