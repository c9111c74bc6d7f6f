"""LoRA+ (arXiv 2402.12354): a learning rate of its own for every adapter's B, around any optimizer.

As in PEFT, DoRA's lengths of rows have that of B; trained scales of rounded weights have that of A
(optim/scale_rate.py).
Weight decay is per unit of that learning rate, as in PEFT's `create_loraplus_optimizer`; equal to it, tested.
"""

from torch import Tensor

from tpu_experiments.optim.base import Named, Optimizer, State
from tpu_experiments.optim.group_rates import update_in_groups
from tpu_experiments.runtime.stacked import ADAPTER_PARTS, MAGNITUDE

OF_B = (ADAPTER_PARTS[1], MAGNITUDE)
"""Last parts of the names of parameters with the learning rate of B."""


class LoraPlus:
    """An optimizer that updates B with `ratio` times the learning rate of A."""

    def __init__(self, optimizer: Optimizer, *, ratio: float) -> None:
        self.optimizer, self.ratio = optimizer, ratio

    def init(self, parameters: Named) -> State:
        return self.optimizer.init(parameters)

    def update(self, parameters: Named, grads: Named, state: State, *, lr: Tensor) -> tuple[dict[str, Tensor], State]:
        groups = [
            (self.optimizer, [name for name in parameters if name.endswith(OF_B) == is_b], rate)
            for is_b, rate in ((False, lr), (True, lr * self.ratio))
        ]
        return update_in_groups(parameters, grads, state, groups=groups)
