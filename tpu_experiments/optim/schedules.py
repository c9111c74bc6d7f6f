"""Learning-rate multipliers as pure functions of the step inside a stage.

The value reaches the device as an input of the step, never as a constant of the graph: one program serves all steps
and all stages. Shapes are those of transformers' schedulers, one update later with a warm-up one step longer, so that
the first update is not at 0 and the last one is at the floor.
"""

import math

from tpu_experiments.config.schema import ScheduleConfig

WARMUP_SHARE, MOST_WARMUP_STEPS = 0.03, 1000
TIMESCALE = 10_000
"""Timescale of `inverse_sqrt` without a warm-up, as in transformers."""


def warmup_steps(schedule: ScheduleConfig, *, num_steps: int) -> int:
    """Return the number of warm-up steps in a stage of `num_steps`."""
    if schedule.warmup_steps is not None:
        return min(schedule.warmup_steps, num_steps)
    if schedule.warmup_ratio is not None:
        return math.ceil(schedule.warmup_ratio * num_steps)
    return min(MOST_WARMUP_STEPS, int(WARMUP_SHARE * num_steps))


def unreached(schedule: ScheduleConfig, *, num_steps: int) -> str | None:
    """Return a sentence where a stage has too few steps for the fall of its schedule; None where it has enough."""
    after = num_steps - warmup_steps(schedule, num_steps=num_steps)
    if schedule.name == "cosine_with_restarts" and 2 * schedule.cycles > after > 0:
        return (
            f"schedule.cycles={schedule.cycles} in {after} steps: a cycle has less than two, so that the rate does not "
            f"fall within one; use {max(1, after // 2)} or fewer"
        )
    decay = math.ceil(schedule.decay_fraction * num_steps)
    if schedule.name == "wsd" and decay < 2 and after > 0:
        return (
            f"schedule.decay_fraction={schedule.decay_fraction:g} of {num_steps} steps is a decay of {decay}, which "
            f"begins at the peak and ends there; use {2 / num_steps:.2g} or more"
        )
    return None


def multiplier(schedule: ScheduleConfig, *, step: int, num_steps: int) -> float:
    """Return the multiple of the peak learning rate for update number `step` (from 0) of `num_steps`.

    Warm-up rises linearly and the first update after it is at the peak; decay reaches `floor` on the last update.
    """
    warmup = warmup_steps(schedule, num_steps=num_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "inverse_sqrt":
        timescale = schedule.timescale or (warmup + 1 if warmup else TIMESCALE)
        return max(schedule.floor, 1 / math.sqrt((timescale + step - warmup) / timescale))
    start = warmup
    if schedule.name == "wsd":
        start = max(warmup, num_steps - math.ceil(schedule.decay_fraction * num_steps))
    if step < start:
        return 1.0
    progress = min(1.0, (step - start) / max(1, num_steps - 1 - start))
    if schedule.name == "cosine":
        return schedule.floor + (1 - schedule.floor) * 0.5 * (1 + math.cos(math.pi * progress))
    shape = schedule.decay_shape if schedule.name == "wsd" else schedule.name
    if shape == "linear":
        return 1.0 + (schedule.floor - 1.0) * progress
    return schedule.floor + (1 - schedule.floor) * _left(schedule, shape, progress)


def _left(schedule: ScheduleConfig, shape: str, progress: float) -> float:
    """Return what is left of the way from the peak to the floor, 1 at the start of the decay and 0 at its end."""
    if shape == "polynomial":
        return float((1 - progress) ** schedule.power)
    if shape == "1-sqrt":
        return 1 - math.sqrt(progress)
    if shape == "cosine_with_restarts":
        if progress == 1:
            return 0.0
        progress = (schedule.cycles * progress) % 1.0
    return 0.5 * (1 + math.cos(math.pi * progress))
