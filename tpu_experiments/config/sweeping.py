"""Schema of `sweeping`: how the points of a sweep (`-m`) are run; a single run does not look at it."""

from dataclasses import dataclass

from tpu_experiments.config.fields import choice, number


@dataclass
class SweepingConfig:
    """Settings that control how the points of a sweep are run."""

    points_at_once: int = number(default=1, at_least=1)
    """Points that run side by side on this host. On a TPU each has one chip to itself, so `hw` is a machine of one chip
    (`hw=v5e1`); on the CPU they share the cores."""
    prune: str = choice("none", "median", default="none")
    """`median` stops a point whose best held-out loss so far is worse than the median of the other points' losses at
    the same step, as Optuna's MedianPruner does. It needs `trainer.eval_every_steps` and the jsonl logger."""
    prune_after_points: int = number(default=3, at_least=1)
    """Other points that must have been evaluated at a step before a point can be stopped there."""
    prune_after_steps: int = number(default=0, at_least=0)
    """Optimizer steps before and at which no point is stopped."""
