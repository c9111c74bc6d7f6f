"""Length of a whole run: its steps, and the other time that a machine is paid for."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpu_experiments.config.curriculum import Stage
from tpu_experiments.config.data_schema import hashed_shares, own_splits
from tpu_experiments.config.defaults import FORWARD_SHARE, costs_of, intervals_of
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import PlanTaskConfig
from tpu_experiments.planning.money import RunLength, StageLength
from tpu_experiments.planning.timing import StepTime

READ_GIB_PER_SECOND = 0.25  # weights from a bucket or the Hub; assumed
SETUP_SECONDS = 180.0  # environment and start of a TPU VM; assumed


@dataclass(frozen=True)
class OutsideSteps:
    """What a run does in addition to its steps."""

    base_gib: float
    """GiB of frozen weights on one chip."""
    eval_rows: int
    """Rows of one evaluation batch, over all chips."""
    eval_batch_seconds: float | None = None
    """Seconds of one evaluation batch; None where the evaluation was not compiled."""
    sample_token_seconds: float | None = None
    """Seconds of one token of the sample; None where that was not compiled."""
    compile_seconds: float | None = None
    """Seconds to compile all programs on this machine."""
    reference_batch_seconds: float | None = None
    """Seconds of one batch, of as many rows, of the pass before the first step; None where it was not compiled."""
    rollout_seconds: float = 0.0
    """Seconds of an iteration before its first step, of a run on its own answers."""
    answer_seconds: float = 0.0
    """Of these, those in which its answers are written, as at an evaluation to held-out prompts."""


def run_length(
    config: Config,
    stages: Sequence[Stage],
    *,
    steps: Mapping[str, int | None],
    times: Mapping[str, StepTime | None],
    outside: OutsideSteps,
) -> tuple[RunLength | None, list[str]]:
    """Return the run's length and what was assumed; no length where a stage's steps or time are unknown.

    Args:
        steps: optimizer steps of every stage.
        times: time of one step of every stage.
    """
    lengths = []
    for stage in stages:
        time, num_steps = times[stage.name], steps[stage.name]
        if time is None or num_steps is None:
            return None, []
        tokens = num_steps * stage.geometry.global_rows * stage.geometry.seq_len
        lengths.append(StageLength(stage.name, num_steps, time.total_s, tokens, stage.epochs))
    eval_seconds, notes = evaluating_seconds(config, stages, lengths=lengths, outside=outside)
    notes.append(
        f"weights are read at {READ_GIB_PER_SECOND} GiB/s and a machine starts in {SETUP_SECONDS:.0f} s (assumed)"
    )
    if outside.compile_seconds is not None:
        notes.append("compiling is counted as long as it took on this machine; the host of a TPU has more cores")
    else:
        notes.append("compile seconds of the TPU host are not added")
    notes.append("checkpoints of adapters are written in the background and take no time")
    setup = SETUP_SECONDS + outside.base_gib * config.hw.num_devices / READ_GIB_PER_SECOND
    compiling = outside.compile_seconds or 0.0
    length = RunLength(
        tuple(lengths),
        eval_seconds=eval_seconds,
        reference_seconds=reference_seconds(config, stages, lengths=lengths, outside=outside),
        compile_seconds=compiling,
        setup_seconds=setup,
        rollout_seconds=outside.rollout_seconds
        * sum(math.ceil(length.steps / config.rollout.updates) for length in lengths),
    )
    return length, notes


def assumed_steps(config: Config, stage: Stage, *, num_parameters: int | None = None) -> int | None:
    """Return the optimizer steps of a stage, as if its rows were full.

    None where a source's tokens are not known, or the model's parameters where the length is a multiple of them. Passes
    over prompts are as long as all documents give one, and None where their number is not known.
    """
    if config.objective.samples_rollouts and stage.epochs is not None:
        return _assumed_passes(config, stage)
    tokens: float | None = stage.tokens
    if stage.tokens_per_parameter is not None and num_parameters is not None:
        tokens = stage.tokens_per_parameter * num_parameters
    if tokens is None:
        kept = _kept(config, stage, "total_tokens")
        if kept is None or stage.epochs is None:
            return None
        tokens = stage.epochs * kept / (1 - stage.replay)
    steps = math.ceil(tokens / (stage.geometry.global_rows * stage.geometry.seq_len))
    return min(steps, config.trainer.max_stage_steps or steps)


def _assumed_passes(config: Config, stage: Stage) -> int | None:
    """Return the optimizer steps of passes over prompts."""
    kept = _kept(config, stage, "total_documents")
    if kept is None or stage.epochs is None:
        return None
    steps = config.rollout.updates * math.ceil(stage.epochs * kept / config.rollout.prompts)
    return min(steps, config.trainer.max_stage_steps or steps)


def _kept(config: Config, stage: Stage, name: str) -> float | None:
    """Return what a stage's sources have of `data.<name>.total_*` to train on; None where that is not known of each."""
    kept = 0.0
    for source in (config.data[each] for each in stage.sources):
        total = getattr(source, name)
        if total is None:
            return None
        kept += total * (1 - sum(hashed_shares(source, own=own_splits(source))))
    return kept


def between_steps(steps: Sequence[int], *, every: int) -> int:
    """Count the evaluations between the steps of a run, as the trainer makes them.

    Those at the last step of a stage are left out.
    """
    first, count = 0, 0
    for num_steps in steps if every else []:
        count += (first + num_steps - 1) // every - first // every
        first += num_steps
    return count


def evaluating_seconds(
    config: Config, stages: Sequence[Stage], *, lengths: Sequence[StageLength], outside: OutsideSteps
) -> tuple[float, list[str]]:
    """Return the seconds of all evaluations and samples, and what was assumed of them."""
    rows = config.trainer.max_eval_rows
    total_steps = sum(length.steps for length in lengths)
    eval_len = max(stage.geometry.seq_len for stage in stages)
    step_tokens = sum(length.tokens for length in lengths) / max(1, total_steps)
    costs = costs_of(config, step_tokens=step_tokens, eval_tokens=rows * eval_len, num_stages=len(lengths))
    intervals = intervals_of(config, total_steps=total_steps, costs=costs)
    every = intervals.evaluate
    num_evaluations = 1 + len(lengths) + between_steps([length.steps for length in lengths], every=every)
    num_samples = 2 + (num_evaluations - 1 if intervals.samples else 0)
    sampling = num_samples * config.sample.max_new_tokens * (outside.sample_token_seconds or 0.0)
    sampling += num_evaluations * math.ceil(rows / config.rollout.num_rows) * outside.answer_seconds
    if outside.eval_batch_seconds is None:
        longest = max(length.step_seconds for length in lengths)
        global_rows = max(stage.geometry.global_rows for stage in stages)
        assumed = f"an evaluation takes a third of a training step's time for its {rows} rows (assumed)"
        return num_evaluations * longest * rows / global_rows * FORWARD_SHARE + sampling, [assumed]
    per_source = max(1, rows // len(config.data))
    batches = len(config.data) * -(-per_source // outside.eval_rows)
    return num_evaluations * batches * outside.eval_batch_seconds + sampling, []


def reference_seconds(
    config: Config, stages: Sequence[Stage], *, lengths: Sequence[StageLength], outside: OutsideSteps
) -> float:
    """Return the seconds of the pass over every row of an epoch, before the first step; 0 where no loss needs it.

    Where it was not compiled, a row takes a third of its part of a training step. The points of a pack share one pass.
    """
    if not config.objective.reads_reference():
        return 0.0
    seconds, adapters = 0.0, config.task.pack if isinstance(config.task, PlanTaskConfig) else 1
    for stage, length in zip(stages, lengths, strict=True):
        rows = length.steps * stage.geometry.global_rows / max(1.0, stage.epochs or 1.0)
        of_row = length.step_seconds * FORWARD_SHARE / (adapters * stage.geometry.global_rows)
        if outside.reference_batch_seconds is not None:
            of_row = outside.reference_batch_seconds / outside.eval_rows
        seconds += rows * of_row
    return seconds
