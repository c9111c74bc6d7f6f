"""Length of the planned run, for both methods: steps per stage, hours, cost, uncompiled programs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tpu_experiments.config.curriculum import Stage, uneven_rows
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.config.sources import QUESTION_ROWS
from tpu_experiments.planning.length import Beside, assumed_steps, run_length
from tpu_experiments.planning.money import cost_of
from tpu_experiments.planning.plan import Plan, Program
from tpu_experiments.planning.timing import StepTime


def steps_of(config: Config, stages: Sequence[Stage]) -> tuple[dict[str, int | None], list[str]]:
    """Return the optimizer steps of every stage, and notes on those that are unknown or assumed.

    An epoch is as long as the prepared data.
    """
    limit = config.trainer.max_stage_steps
    steps = {stage.name: stage.steps and min(stage.steps, limit or stage.steps) for stage in stages}
    if None not in steps.values():
        return steps, []
    # Importing tokenizers and readers takes seconds.
    from tpu_experiments.data.prepared import NotPrepared
    from tpu_experiments.training.inputs import RunInputs, shuffled_rows, stage_steps
    from tpu_experiments.training.sources import prepare_sources, tokenizer_for

    try:
        tokenizer = tokenizer_for(config)
        sources = prepare_sources(config, tokenizer=tokenizer, stages=list(stages), is_lookup=True)
    except (NotPrepared, ConfigError) as error:
        why = f"data.{error} is not prepared (task=prepare)" if isinstance(error, NotPrepared) else str(error)
        steps = {stage.name: steps[stage.name] or assumed_steps(config, stage) for stage in stages}
        if None in steps.values():
            return steps, [f"hours and dollars need the length of an epoch: {why}"]
        return steps, [f"the length of an epoch is assumed from data.<name>.total_tokens: {why}"]
    inputs = RunInputs(tokenizer, sources, list(stages))
    rows = {stage.name: shuffled_rows(inputs, stage, seed=config.seed) for stage in stages}
    return {stage.name: stage_steps(rows[stage.name], stage, inputs=inputs, config=config) for stage in stages}, []


def with_run(
    plan: Plan, config: Config, stages: Sequence[Stage], *, times: Mapping[str, StepTime | None], beside: Beside
) -> Plan:
    """Return the plan with the length and cost of the whole run; `times` is one step's time by stage."""
    hw = config.hw
    steps, unknown = steps_of(config, stages)
    length, notes = run_length(config, stages, steps=steps, times=times, beside=beside)
    cost = cost_of(length, price=hw.price, num_devices=hw.num_devices, calibration=plan.calibration) if length else None
    return replace(plan, run=length, cost=cost, notes=(*plan.notes, *unknown, *notes, *uneven_rows(stages)))


def counted_only(config: Config) -> Iterator[Program]:
    """Yield evaluation, sample and questions as programs that are counted but not compiled."""
    yield Program("eval", (), "held-out rows", None)
    if config.sample.max_new_tokens:
        yield Program("sample", (), f"{len(config.sample.all_prompts)} x {config.sample.window}", None)
    if config.questions:
        yield Program("ask", (), f"{QUESTION_ROWS} x {config.sample.window}", None)
