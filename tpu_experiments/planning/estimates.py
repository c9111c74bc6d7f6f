"""The planned figures that a run is held against when it has ended."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tpu_experiments.config.curriculum import Stage
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.loggers.plan_estimates import PlanEstimates
from tpu_experiments.planning.analytic import estimated_time, largest_stage
from tpu_experiments.planning.stored_plans import SavedPlan, known_plan, sizes_of
from tpu_experiments.planning.tuned import fields_of

NOT_ALL = "the plan did not compile every program of the run (task.programs=train)"


def estimates_of(config: Config, stages: Sequence[Stage]) -> PlanEstimates:
    """Return the figures of the compiled plan of the same programs, otherwise those of formulas.

    Empty, with the reason, where there is neither.
    """
    if config.hw.chip is None or config.hw.topology is None:
        return PlanEstimates(reason=f"hw={config.hw.name} names no chip and topology to plan for")
    arch = sizes_of(config.model)
    if arch is None:
        return PlanEstimates(reason=f"model.path={config.model.path}; its config.json cannot be read")
    try:
        known = known_plan(config, arch, stages)
        found = from_formulas(config, arch, stages) if known is None else from_plan(config, known, stages)
        return replace(found, tuned=fields_of(config))
    except ConfigError as error:
        return PlanEstimates(reason=str(error))


def from_plan(config: Config, plan: SavedPlan, stages: Sequence[Stage]) -> PlanEstimates:
    """Return the figures of a plan.json."""
    programs = plan.fields["programs"]
    seconds = {p["shape"]: p["estimated_seconds"] for p in programs if p["name"] == "train"}
    of_stages = {stage.name: seconds.get(shape_text(config, stage)) for stage in stages}
    is_whole = all(program["compile_seconds"] is not None for program in programs)
    return PlanEstimates(
        source="compiled",
        file=plan.file,
        step_seconds={name: time for name, time in of_stages.items() if time is not None},
        hbm_gib=plan.fields["hbm_gib_per_chip"]["arguments"],
        compile_seconds=plan.fields["compile_seconds"] if is_whole else None,
        reason="" if plan.fields["fits"] else "by the plan the run does not fit",
        compile_reason="" if is_whole else NOT_ALL,
    )


def shape_text(config: Config, stage: Stage) -> str:
    """Return the batch of one process in a stage, as in plan.json: micro-batches x rows x tokens."""
    geometry = stage.geometry
    rows = geometry.micro_rows * (1 if config.hw.parallel == "spawn" else geometry.num_shards)
    return f"{geometry.accumulation} x {rows} x {geometry.seq_len}"


def from_formulas(config: Config, arch: Any, stages: Sequence[Stage]) -> PlanEstimates:
    """Return the figures of every stage by formulas."""
    times = {s.name: estimated_time(config, arch, geometry=s.geometry).total_s for s in stages}
    return PlanEstimates(
        source="analytic",
        step_seconds=times,
        hbm_gib=largest_stage(config, arch, stages)[1].arguments,
        compile_reason="formulas do not estimate compile seconds",
    )
