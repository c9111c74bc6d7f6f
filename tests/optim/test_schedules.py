"""Learning-rate multipliers at named steps, written out, and those of transformers' schedulers."""

import math
import re

import pytest
import torch
from transformers import SchedulerType, get_scheduler

from tests.config.composing import composed
from tpu_experiments.config.curriculum import Stage, resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import SHAPES, ScheduleConfig
from tpu_experiments.config.words import CHOICES
from tpu_experiments.optim.schedules import multiplier, unreached

EXACT = {"rel": 0, "abs": 1e-15}


def values(schedule: ScheduleConfig, num_steps: int) -> list[float]:
    return [multiplier(schedule, step=step, num_steps=num_steps) for step in range(num_steps)]


def test_constant():
    assert values(ScheduleConfig("constant"), 4) == [1.0, 1.0, 1.0, 1.0]


def test_constant_warms_up_to_the_peak_at_update_number_warmup_steps():
    assert values(ScheduleConfig("constant", warmup_steps=3), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_zero_on_the_last_update():
    assert values(ScheduleConfig("linear"), 5) == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_linear_with_warmup_and_floor():
    schedule = ScheduleConfig("linear", warmup_steps=1, floor=0.5)
    assert values(schedule, 6) == [0.5, 1.0, 0.875, 0.75, 0.625, 0.5]


def test_cosine_with_floor():
    expected = [1.0, 0.1 + 0.9 * 0.5 * (1 + math.sqrt(0.5)), 0.55, 0.1 + 0.9 * 0.5 * (1 - math.sqrt(0.5)), 0.1]
    assert values(ScheduleConfig("cosine", floor=0.1), 5) == pytest.approx(expected, **EXACT)


def test_cosine_starts_its_fall_after_the_warmup():
    schedule = ScheduleConfig("cosine", warmup_steps=2)
    assert values(schedule, 5) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.5, 0.0], **EXACT)


def test_wsd_holds_the_peak_then_falls_over_the_last_share_of_steps():
    schedule = ScheduleConfig("wsd", warmup_steps=1, decay_fraction=0.3)
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    assert values(schedule, 10) == pytest.approx(expected, **EXACT)


def test_wsd_falls_over_a_whole_number_of_steps_rounded_up():
    """0.25 of 10 steps are 3, 0.01 of 10 is 1: the last update is at the floor."""
    assert values(ScheduleConfig("wsd", warmup_steps=0, decay_fraction=0.25), 10) == [1.0] * 8 + [0.5, 0.0]
    assert values(ScheduleConfig("wsd", warmup_steps=0, decay_fraction=0.35), 10)[5:] == pytest.approx(
        [1.0, 1.0, 2 / 3, 1 / 3, 0.0], **EXACT
    )


def test_wsd_decay_never_starts_inside_the_warmup():
    schedule = ScheduleConfig("wsd", warmup_steps=3, decay_fraction=1.0, floor=0.2)
    assert values(schedule, 6) == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.6, 0.2], **EXACT)


@pytest.mark.parametrize("name", SHAPES)
def test_a_single_step_runs_at_the_peak(name):
    assert values(ScheduleConfig(name, floor=0.1), 1) == [1.0]


@pytest.mark.parametrize("name", SHAPES)
def test_a_warmup_longer_than_the_stage_only_rises(name):
    assert values(ScheduleConfig(name, warmup_steps=9), 3) == [0.25, 0.5, 0.75]


# ---- transformers' schedulers -------------------------------------------------------------------------------

NUM_STEPS, WARMUP, LR, MIN_LR = 50, 7, 2e-4, 3e-5
OURS_AND_THEIRS = {
    "constant_with_warmup": ("constant", {}, {}),
    "linear": ("linear", {}, {}),
    "cosine": ("cosine", {}, {}),
    "cosine_with_restarts": ("cosine_with_restarts", {"cycles": 3}, {"num_cycles": 3}),
    "polynomial": ("polynomial", {"power": 2.5, "floor": MIN_LR / LR}, {"power": 2.5, "lr_end": MIN_LR}),
    "inverse_sqrt": ("inverse_sqrt", {}, {}),
    "inverse_sqrt of a timescale": ("inverse_sqrt", {"timescale": 25}, {"timescale": 25}),
    "cosine_with_min_lr": ("cosine", {"floor": MIN_LR / LR}, {"min_lr": MIN_LR}),
    "warmup_stable_decay": ("wsd", {"floor": 0.2}, {"min_lr_ratio": 0.2, "decay_type": "linear"}),
    "warmup_stable_decay by a cosine": (
        *("wsd", {"floor": 0.2, "decay_shape": "cosine"}),
        {"min_lr_ratio": 0.2, "decay_type": "cosine"},
    ),
    "warmup_stable_decay by a root": (
        *("wsd", {"floor": 0.2, "decay_shape": "1-sqrt"}),
        {"min_lr_ratio": 0.2, "decay_type": "1-sqrt"},
    ),
}
"""transformers' SchedulerType, our name and settings, and theirs."""


@pytest.mark.parametrize("warmup", [0, WARMUP])
@pytest.mark.parametrize("case", OURS_AND_THEIRS)
def test_every_rate_is_that_of_transformers(case: str, warmup: int) -> None:
    """One update later and with a warm-up one step longer, so that no update is at 0 and the last one is at the end."""
    name, own, theirs = OURS_AND_THEIRS[case]
    ours = ScheduleConfig(name, warmup_steps=warmup, decay_fraction=0.3, **own)
    if name == "wsd":
        theirs = {**theirs, "num_decay_steps": math.ceil(0.3 * NUM_STEPS) - 1}
    if name == "inverse_sqrt" and not warmup and not own:
        theirs = {"timescale": 10_000}  # without a warm-up, which theirs has here
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=LR)
    scheduler = get_scheduler(
        case.split()[0],
        optimizer,
        num_warmup_steps=warmup + 1,
        num_training_steps=NUM_STEPS,
        scheduler_specific_kwargs=theirs,
    )
    found = []
    for _ in range(NUM_STEPS):
        optimizer.step()
        scheduler.step()
        found.append(scheduler.get_last_lr()[0])
    expected = [LR * value for value in values(ours, NUM_STEPS)]
    first = warmup if name == "wsd" else 0  # transformers' wsd rises from its floor, as no other of its schedulers does
    assert expected[first:] == pytest.approx(found[first:], rel=1e-6, abs=1e-6 * LR)
    assert min(found) > 0 or found[-1] == 0


def test_every_scheduler_of_transformers_works_or_is_named() -> None:
    done = {case.split()[0] for case in OURS_AND_THEIRS}
    assert {each.value for each in SchedulerType} == done | {"constant"} | CHOICES["schedule"].keys()


def test_restarts_begin_at_the_peak_and_the_last_update_is_at_the_floor() -> None:
    found = values(ScheduleConfig("cosine_with_restarts", cycles=2, floor=0.1), 9)
    assert found == pytest.approx([1.0, *found[1:4], 1.0, *found[1:4], 0.1], **EXACT)
    assert found[1:4] == sorted(found[1:4], reverse=True)
    assert values(ScheduleConfig("cosine_with_restarts", cycles=1), 9) == values(ScheduleConfig("cosine"), 9)


def test_a_share_of_the_steps_warms_up() -> None:
    assert values(ScheduleConfig("constant", warmup_ratio=0.3), 7) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]
    assert values(ScheduleConfig("linear", warmup_ratio=0.0), 5) == values(ScheduleConfig("linear"), 5)


def test_inverse_sqrt_ends_at_its_floor() -> None:
    found = values(ScheduleConfig("inverse_sqrt", timescale=1, floor=0.5), 9)
    assert found == pytest.approx([1.0, math.sqrt(1 / 2), math.sqrt(1 / 3), *[0.5] * 6], **EXACT)


# ---- of a config --------------------------------------------------------------------------------------------

STAGE = "curriculum.stages.chat"
TWO = ("model=tiny", "data=[sample_text,sample_chat]", "optim.lr=1e-3")


def stages(*words: str) -> dict[str, Stage]:
    return {stage.name: stage for stage in resolve_stages(composed(*TWO, *words))}


def test_an_absolute_end_is_a_floor_of_each_stages_peak() -> None:
    found = stages("schedule.min_lr=1e-4", f"{STAGE}.lr=4e-4")
    assert {name: stage.schedule.floor for name, stage in found.items()} == {"text": 0.1, "chat": 0.25}
    assert stages("schedule.min_lr=1e-4", f"{STAGE}.schedule.floor=0.5")["chat"].schedule.floor == 0.5
    assert stages("schedule.floor=0.5", f"{STAGE}.schedule.min_lr=3e-4")["chat"].schedule.floor == pytest.approx(0.3)


def test_a_stages_warmup_is_in_the_place_of_the_runs() -> None:
    assert stages("schedule.warmup_steps=3", f"{STAGE}.schedule.warmup_ratio=0.5")["chat"].schedule.warmup_steps is None
    assert stages("schedule.warmup_ratio=0.5", f"{STAGE}.schedule.warmup_steps=3")["chat"].schedule.warmup_ratio is None


REFUSED = {
    "schedule.warmup_steps=3 schedule.warmup_ratio=0.1": "schedule.warmup_steps=3 and schedule.warmup_ratio=0.1; both",
    f"{STAGE}.schedule.warmup_steps=3 {STAGE}.schedule.warmup_ratio=0.1": f"{STAGE}.schedule.warmup_steps=3 and",
    "schedule.min_lr=2e-3": "schedule.min_lr=0.002 is above the peak of stage text, 0.001",
    f"{STAGE}.schedule.min_lr=2e-3": f"{STAGE}.schedule.min_lr=0.002 is above the peak of stage chat, 0.001",
    f"{STAGE}.schedule.min_lr=1e-4 {STAGE}.schedule.floor=0.1": "both set the end of the decay",
    "schedule.min_lr=1e-4 schedule=constant": "it never falls",
    "schedule.cycles=3": "schedule.cycles=3 with schedule=cosine; it is a key of cosine_with_restarts alone.",
    f"{STAGE}.schedule.power=2": "schedule.power=2.0 with the schedule cosine; it is a key of polynomial alone.",
    "schedule.timescale=9 schedule=wsd": "schedule.timescale=9 with schedule=wsd; it is a key of inverse_sqrt alone.",
    "schedule.warmup_ratio=1": "schedule.warmup_ratio=1.0; it must be below 1.",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_contradicts_itself_is_refused(words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(REFUSED[words])):
        composed(*TWO, *words.split(" "))


def test_a_key_that_one_stage_reads_is_no_mistake() -> None:
    found = stages("schedule.cycles=3", f"{STAGE}.schedule.name=cosine_with_restarts")
    assert (found["chat"].schedule.cycles, found["chat"].schedule.name) == (3, "cosine_with_restarts")


@pytest.mark.parametrize(
    ("schedule", "num_steps", "said"),
    [
        (ScheduleConfig(name="cosine_with_restarts", cycles=50, warmup_steps=0), 99, "cycles=50 in 99 steps: a"),
        (ScheduleConfig(name="cosine_with_restarts", cycles=50, warmup_steps=0), 100, None),
        (ScheduleConfig(name="cosine_with_restarts", cycles=3, warmup_steps=5), 10, "use 2 or fewer"),
        (ScheduleConfig(name="wsd", decay_fraction=0.1, warmup_steps=0), 10, "of 10 steps is a decay of 1, which"),
        (ScheduleConfig(name="wsd", decay_fraction=0.1, warmup_steps=0), 11, None),
        (ScheduleConfig(name="wsd", decay_fraction=0.001, warmup_steps=0), 1000, "use 0.002 or more"),
        (ScheduleConfig(name="cosine", warmup_steps=0), 1, None),
    ],
)
def test_a_fall_that_a_stage_is_too_short_for_is_told(schedule, num_steps, said) -> None:
    """Cycles of one step are all at the peak, and so is a decay of one."""
    found = unreached(schedule, num_steps=num_steps)
    assert (found is None) == (said is None)
    assert said is None or said in found
    rates = [multiplier(schedule, step=step, num_steps=num_steps) for step in range(num_steps)]
    assert said is not None or num_steps == 1 or min(rates) < 0.9
