"""Plans from formulas alone (no compiler, no torch_xla), and the run's length as both methods need it."""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tpu_experiments.config.curriculum import Stage, resolve_stages, uneven_rows
from tpu_experiments.config.data_schema import QUESTION_ROWS
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.config.targets import locate
from tpu_experiments.config.task_schema import DecodeConfig
from tpu_experiments.models.huggingface import HuggingFaceModel, shapes_only
from tpu_experiments.objectives.base import model_source, samples
from tpu_experiments.planning.analytic import analytic_plan, estimated_time, largest_stage
from tpu_experiments.planning.check import remedies_for
from tpu_experiments.planning.compiler import versions
from tpu_experiments.planning.length import OutsideSteps, assumed_steps, run_length
from tpu_experiments.planning.money import cost_of
from tpu_experiments.planning.plan import Plan, Program
from tpu_experiments.planning.timing import StepTime
from tpu_experiments.tasks.plan.rollouts import answers_of, num_scores, writes_rollouts

OF_A_GPU = (
    "plain torch on a GPU may reach neither: three recipes on an H200 took 0.9 to 4.8 times the planned step and 1.0 "
    "to 2.4 times the planned memory (tests/benchmarks/RESULTS.md, 2026-11-27)"
)
"""Said of every plan of a GPU."""


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
    from tpu_experiments.tasks.setup import prompts_of
    from tpu_experiments.training.batches import (
        RunInputs,
        load_run_tokenizer,
        parameters_of_lengths,
        prepare_sources,
        shuffled_rows,
        stage_rows,
        stage_steps,
    )

    num_parameters = parameters_of_lengths(stages, source=lambda: shapes_source(config))
    try:
        tokenizer = load_run_tokenizer(config)
        sources = prepare_sources(config, tokenizer=tokenizer, stages=list(stages), is_lookup=True)
    except (NotPrepared, ConfigError) as error:
        why = f"data.{error} is not prepared (task=prepare)" if isinstance(error, NotPrepared) else str(error)
        steps = {
            stage.name: steps[stage.name] or assumed_steps(config, stage, num_parameters=num_parameters)
            for stage in stages
        }
        if None in steps.values():
            return steps, [f"hours and dollars need the length of an epoch: {why}"]
        known = "total_documents" if config.objective.samples_rollouts else "total_tokens"
        return steps, [f"the length of an epoch is assumed from data.<name>.{known}: {why}"]
    inputs = RunInputs(tokenizer, sources, list(stages), num_parameters=num_parameters)
    if config.objective.samples_rollouts:
        inputs.prompts = prompts_of(config, stages, tokenizer=tokenizer)
        rows = {stage.name: stage_rows(inputs, stage, config=config) for stage in stages}
    else:
        rows = {stage.name: shuffled_rows(inputs, stage, seed=config.seed) for stage in stages}
    return {stage.name: stage_steps(rows[stage.name], stage, inputs=inputs, config=config) for stage in stages}, []


def with_run(
    plan: Plan, config: Config, stages: Sequence[Stage], *, times: Mapping[str, StepTime | None], outside: OutsideSteps
) -> Plan:
    """Return the plan with the length and cost of the whole run; `times` is one step's time by stage."""
    hw = config.hw
    steps, unknown = steps_of(config, stages)
    length, notes = run_length(config, stages, steps=steps, times=times, outside=outside)
    cost = cost_of(length, price=hw.price, num_devices=hw.num_devices, calibration=plan.calibration) if length else None
    return replace(plan, run=length, cost=cost, notes=(*plan.notes, *unknown, *notes, *uneven_rows(stages)))


def counted_only(config: Config) -> Iterator[Program]:
    """Yield what is not a training step as programs that are counted but not compiled."""
    yield Program("eval", (), "held-out rows", None)
    if config.objective.reads_reference():
        yield Program("reference", (), "rows of an epoch", None)
    if num_scores(config):
        yield Program("score", (), "rows of a rollout", None)
    if samples(config):
        yield Program("sample", (), f"{len(config.sample.all_prompts)} x {config.sample.window}", None)
    if config.questions:
        yield Program("ask", (), f"{QUESTION_ROWS} x {config.sample.window}", None)
    if writes_rollouts(config):
        answers = answers_of(config, DecodeConfig())
        yield Program("merge", (), "weights", None)
        if config.optim.is_averaged:
            yield Program("merge averages", (), "weights", None)
        yield Program("read", (), f"{answers.rows} x {answers.prompt_tokens}", None)
        yield Program("write", (), f"{answers.rows} x {answers.tokens_per_call}", None)


def shapes_source(config: Config) -> HuggingFaceModel:
    """Make the source of the model that the objective trains, with weights on the meta device."""
    return model_source(config, kind=shapes_only(locate(config.model._target_, key="model")))


def arch_of(config: Config) -> Any:
    """Return the model's transformers config, from a local checkpoint or else `model.arch`."""
    return shapes_source(config).config


def formula_plan(config: Config) -> Plan:
    """Return the whole plan of a config by formulas."""
    arch = arch_of(config)
    installed = importlib.util.find_spec("libtpu")
    stages = resolve_stages(config)
    reason = "task.method=analytic" if installed else "libtpu is not installed"
    if config.hw.device == "cuda":
        reason = "the compiler is that of TPUs"
    plan = analytic_plan(config, arch, stages, reason=reason)
    plan = replace(plan, versions=versions(), programs=(*plan.programs, *counted_only(config)))
    if config.hw.device == "cuda":
        plan = replace(plan, notes=(*plan.notes, OF_A_GPU))
    if plan.shortage is not None:
        geometry = largest_stage(config, arch, stages)[0].geometry
        remedies = remedies_for(config, arch, memory=plan.memory, geometry=geometry)
        return replace(plan, shortage=replace(plan.shortage, remedies=remedies))
    times = {stage.name: estimated_time(config, arch, geometry=stage.geometry) for stage in stages}
    rows = stages[0].geometry.micro_rows * stages[0].geometry.num_shards
    outside = OutsideSteps(base_gib=plan.memory.classes.get("base weights", 0.0), eval_rows=rows)
    return with_run(plan, config, stages, times=times, outside=outside)
