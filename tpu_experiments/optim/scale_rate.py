"""A learning rate of its own for the trained scales of rounded weights, around any optimizer."""

from torch import Tensor

from tpu_experiments.optim.base import Named, Optimizer, State
from tpu_experiments.optim.group_rates import update_in_groups
from tpu_experiments.runtime.stacked import is_learnt_scale


class ScaleRate:
    """An optimizer that updates scales with `ratio` times the learning rate (LR-QAT, arXiv 2406.06385)."""

    def __init__(self, optimizer: Optimizer, *, ratio: float) -> None:
        self.optimizer, self.ratio = optimizer, ratio

    def init(self, parameters: Named) -> State:
        return self.optimizer.init(parameters)

    def update(self, parameters: Named, grads: Named, state: State, *, lr: Tensor) -> tuple[dict[str, Tensor], State]:
        groups = [
            (self.optimizer, [name for name in parameters if is_learnt_scale(name) == is_scale], rate)
            for is_scale, rate in ((False, lr), (True, lr * self.ratio))
        ]
        return update_in_groups(parameters, grads, state, groups=groups)
