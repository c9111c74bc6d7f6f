"""How often a run logs, evaluates and saves, where the command leaves that to its length."""

from dataclasses import dataclass

from tpu_experiments.config.schema import Config

ROUND = (1, 2, 5)
ASKED_EVERY = 50
"""Steps between two evaluations at least, where they ask questions: with 120 of them one takes as long as 8 steps."""


@dataclass(frozen=True)
class Intervals:
    """Steps between log records, evaluations and checkpoints.

    For evaluations and checkpoints, 0 means none between the first step and the last.
    """

    log: int
    evaluate: int
    save: int


def intervals_of(config: Config, *, total_steps: int) -> Intervals:
    """Return the configured intervals, with round numbers of steps in place of null."""
    log, evaluate, save = config.trainer.log_every_steps, config.trainer.eval_every_steps, config.checkpoint.every_steps
    evaluated = max(ASKED_EVERY if config.questions else 1, _round(total_steps / 10, at_most=1000))
    return Intervals(
        log=_round(total_steps / 20, at_most=100) if log is None else log,
        evaluate=evaluated if evaluate is None else evaluate,
        save=max(50, _round(total_steps / 20, at_most=500)) if save is None else save,
    )


def _round(steps: float, *, at_most: int) -> int:
    """Return the largest of 1, 2, 5, 10, 20, 50, ... that exceeds neither limit, at least 1."""
    limit = max(1.0, min(steps, at_most))
    return max(n * 10**power for n in ROUND for power in range(7) if n * 10**power <= limit)
