"""The length of a run: evaluations as the trainer makes them, compiled or assumed."""

import math
from dataclasses import replace

import pytest

from tests.config.composing import composed
from tpu_experiments.config.curriculum import long_warmups, resolve_stages, uneven_rows
from tpu_experiments.config.defaults import FORWARD_SHARE
from tpu_experiments.config.task_schema import PlanTaskConfig
from tpu_experiments.planning.length import OutsideSteps, assumed_steps, between_steps, run_length
from tpu_experiments.planning.timing import StepTime

STEP = StepTime(0.5, 0.0, 0.0, 0.0, 0.5, "compute", 0.4, 1000.0)
CONFIG = composed("hw=v6e1", "trainer.eval_every_steps=30")
STAGES = resolve_stages(CONFIG)


@pytest.mark.parametrize(
    ("steps", "every", "count"), [([60, 60], 30, 2), ([60, 60], 0, 0), ([61, 59], 30, 3), ([7], 7, 0), ([5, 5], 4, 2)]
)
def test_evaluations_between_steps_leave_out_the_last_of_a_stage(steps: list[int], every: int, count: int) -> None:
    at, found = 0, 0
    for num_steps in steps:
        found += sum((at + step) % every == 0 for step in range(1, num_steps)) if every else 0
        at += num_steps
    assert between_steps(steps, every=every) == found == count


def length_of(outside: OutsideSteps):
    steps, times = {"text": 60, "chat": 60}, {"text": STEP, "chat": STEP}
    return run_length(CONFIG, STAGES, steps=steps, times=times, outside=outside)


def test_a_compiled_evaluation_is_counted_in_batches_and_an_assumed_one_by_rows() -> None:
    length, notes = length_of(OutsideSteps(8.0, 16, 0.25, 0.125, 77.0))
    assert length is not None
    assert length.parts == {
        "training": 60.0,
        "evaluation": 5 * (2 * 8) * 0.25 + 6 * 48 * 0.125,
        "checkpoints": 0.0,
        "compiling": 77.0,
        "idle set-up": 180 + 8 / 0.25,
    }
    assert not any("a third" in note for note in notes)
    length, notes = length_of(OutsideSteps(8.0, 16))
    assert length is not None
    assert length.eval_seconds == pytest.approx(5 * 0.5 * 256 / 16 * FORWARD_SHARE)
    assert length.compile_seconds == 0
    assert any("a third" in note for note in notes)


def test_samples_at_the_ends_only_are_two() -> None:
    at_ends = composed("hw=v6e1", "trainer.eval_every_steps=30", "sample.at=ends")
    steps, times = {"text": 60, "chat": 60}, {"text": STEP, "chat": STEP}
    length, _ = run_length(at_ends, STAGES, steps=steps, times=times, outside=OutsideSteps(8.0, 16, 0.25, 0.125, 77.0))
    assert length is not None
    assert length.eval_seconds == 5 * (2 * 8) * 0.25 + 2 * 48 * 0.125


def test_a_loss_that_compares_with_a_reference_reads_every_row_of_an_epoch_before() -> None:
    config = composed(
        "hw=v6e1", "objective=dpo", "data=stories_pairs_ro", "curriculum=single", "curriculum.stages.main.epochs=2"
    )
    stages = resolve_stages(config)
    outside, rows = OutsideSteps(8.0, 8, reference_batch_seconds=0.25), 30 * stages[0].geometry.global_rows
    how = {"steps": {"main": 60}, "times": {"main": STEP}}
    length, _ = run_length(config, stages, outside=outside, **how)
    assert length is not None
    assert length.parts["reference"] == rows / 8 * 0.25
    assumed, _ = run_length(config, stages, outside=OutsideSteps(8.0, 8), **how)
    assert assumed is not None
    assert assumed.reference_seconds == pytest.approx(30 * 0.5 * FORWARD_SHARE)
    there = assumed.seconds - sum(seconds for name, seconds in assumed.parts.items() if name != "reference")
    assert there == pytest.approx(assumed.reference_seconds)
    packed = replace(config, task=PlanTaskConfig("plan", pack=4))  # the step is that of all four
    together, _ = run_length(packed, stages, outside=OutsideSteps(8.0, 8), **how)
    assert together is not None
    assert together.reference_seconds == pytest.approx(assumed.reference_seconds / 4)
    assert together.eval_seconds == pytest.approx(assumed.eval_seconds)


def test_an_epoch_is_assumed_until_its_data_is_prepared() -> None:
    """687,000 tokens, four fifths of them trained on, three times, in steps of 16 x 896."""
    (stage,) = resolve_stages(composed("model=qwen05b", "data=uk_law", "hw=v5e8"))
    config = composed("model=qwen05b", "data=uk_law", "hw=v5e8")
    assert assumed_steps(config, stage) == math.ceil(3 * 0.8 * 687_000 / (16 * 896)) == 116
    assert assumed_steps(composed("data=uk_law", "trainer.max_stage_steps=9"), stage) is not None
    config.data["uk_law"].total_tokens = None
    assert assumed_steps(config, stage) is None
    (of_tokens,) = resolve_stages(composed("data=uk_law", "curriculum=single", "curriculum.stages.main.tokens=5000"))
    assert assumed_steps(config, of_tokens) == 3


def test_passes_over_prompts_are_assumed_until_their_data_is_prepared() -> None:
    """7,473 conversations, beside those that are held out, twice, 32 at a time, with two steps on each 32."""
    words = ("experiment=qwen05b_gsm8k", "rollout.updates=2")
    config = composed(*words)
    (stage,) = resolve_stages(config)
    assert assumed_steps(config, stage) == 2 * math.ceil(2 * 7473 / 32) == 936
    assert assumed_steps(composed(*words, "trainer.max_stage_steps=9"), stage) == 9
    config.data["gsm8k"].total_documents = None
    assert assumed_steps(config, stage) is None


def test_without_a_time_or_steps_there_is_no_length() -> None:
    outside = OutsideSteps(8.0, 16)
    assert run_length(
        CONFIG, STAGES, steps={"text": 60, "chat": None}, times={"text": STEP, "chat": STEP}, outside=outside
    ) == (None, [])


@pytest.mark.parametrize(("seq_len", "computed"), [(128, None), (1024, None), (100, 128), (1000, 1024), (8, 128)])
def test_rows_that_a_tpu_computes_more_for_are_reported(seq_len: int, computed: int | None) -> None:
    told = uneven_rows(resolve_stages(composed("curriculum=ro_two_stage", "hw=v5e8", f"trainer.seq_len={seq_len}")))
    if computed is None:
        assert told == []
    else:
        assert len(told) == 1, "both stages have one length"
        assert told[0].startswith(
            f"rows of {seq_len} tokens are no multiple of 128, the width of a TPU's tiles, so they"
        )
        assert f"are computed as {computed}; use that many" in told[0]


@pytest.mark.parametrize(("warmup", "is_told"), [("null", False), (3, False), (37, False), (38, True), (500, True)])
def test_a_warm_up_that_leaves_no_step_at_the_peak_is_reported(warmup: str | int, is_told: bool) -> None:
    stages = resolve_stages(composed("curriculum=ro_two_stage", "hw=v5e8", f"schedule.warmup_steps={warmup}"))
    told = long_warmups(stages, {"text": 38, "chat": 2000})
    assert [text.partition(":")[0] for text in told] == (
        [f"schedule.warmup_steps={warmup} with 38 steps in stage text"] if is_told else []
    )
