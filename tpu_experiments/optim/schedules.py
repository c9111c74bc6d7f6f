"""Learning-rate multipliers as pure functions of the step inside a stage.

The value reaches the device as an input of the step, never as a constant of the graph: one program serves all steps
and all stages.
"""

import math

from tpu_experiments.config.schema import ScheduleConfig

WARMUP_SHARE, MOST_WARMUP_STEPS = 0.03, 1000


def warmup_steps(schedule: ScheduleConfig, *, num_steps: int) -> int:
    """Return the number of warm-up steps in a stage of `num_steps`."""
    if schedule.warmup_steps is None:
        return min(MOST_WARMUP_STEPS, int(WARMUP_SHARE * num_steps))
    return min(schedule.warmup_steps, num_steps)


def multiplier(schedule: ScheduleConfig, *, step: int, num_steps: int) -> float:
    """Return the multiple of the peak learning rate for update number `step` (from 0) of `num_steps`.

    Warm-up rises linearly and the first update after it is at the peak; decay reaches `floor` on the last update.
    """
    warmup = warmup_steps(schedule, num_steps=num_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule.name == "constant":
        return 1.0
    start = warmup
    if schedule.name == "wsd":
        start = max(warmup, num_steps - math.ceil(schedule.decay_fraction * num_steps))
    if step < start:
        return 1.0
    progress = (step - start) / max(1, num_steps - 1 - start)
    if schedule.name == "cosine":
        return schedule.floor + (1 - schedule.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return 1.0 + (schedule.floor - 1.0) * min(1.0, progress)
