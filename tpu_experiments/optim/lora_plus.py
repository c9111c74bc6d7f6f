"""LoRA+ (arXiv 2402.12354): a learning rate of its own for every adapter's B, around any optimizer.

As in PEFT, DoRA's lengths of rows have that of B; trained scales of rounded weights have that of A
(optim/scale_rate.py).
Weight decay is per unit of that learning rate, as in PEFT's `create_loraplus_optimizer`; equal to it, tested.
"""

from tpu_experiments.optim.group_rates import PartRate
from tpu_experiments.runtime.stacked import ADAPTER_PARTS, MAGNITUDE


class LoraPlus(PartRate):
    """An optimizer that updates B with `ratio` times the learning rate of A."""

    ends = (ADAPTER_PARTS[1], MAGNITUDE)
