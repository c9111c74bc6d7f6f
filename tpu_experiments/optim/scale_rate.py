"""A learning rate of its own for the trained scales of rounded weights, around any optimizer."""

from tpu_experiments.optim.group_rates import PartRate
from tpu_experiments.runtime.stacked import LEARNT_SCALE


class ScaleRate(PartRate):
    """An optimizer that updates scales with `ratio` times the learning rate (LR-QAT, arXiv 2406.06385)."""

    ends = (LEARNT_SCALE,)
