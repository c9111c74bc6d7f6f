"""Plan by formulas alone, without compiler and torch_xla."""

import importlib.util
from dataclasses import replace
from typing import Any

from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.schema import Config
from tpu_experiments.models.shapes import ShapesOfModel
from tpu_experiments.planning.analytic import analytic_plan, estimated_time, largest_stage
from tpu_experiments.planning.compiler import versions
from tpu_experiments.planning.length import Beside
from tpu_experiments.planning.plan import Plan
from tpu_experiments.planning.remedies import remedies_for
from tpu_experiments.tasks.plan.length import counted_only, with_run


def arch_of(config: Config) -> Any:
    """Return the model's transformers config, from a local checkpoint or else `model.arch`."""
    return ShapesOfModel(config.model, seed=config.seed).config


def formula_plan(config: Config) -> Plan:
    """Return the whole plan of a config by formulas."""
    arch = arch_of(config)
    installed = importlib.util.find_spec("libtpu")
    reason = "task.method=analytic" if installed else "libtpu is not installed"
    plan = analytic_plan(config, arch, reason=reason)
    plan = replace(plan, versions=versions(), programs=(*plan.programs, *counted_only(config)))
    if plan.shortage is not None:
        geometry = largest_stage(config, arch)[0].geometry
        remedies = remedies_for(config, arch, memory=plan.memory, geometry=geometry)
        return replace(plan, shortage=replace(plan.shortage, remedies=remedies))
    stages = resolve_stages(config)
    times = {stage.name: estimated_time(config, arch, geometry=stage.geometry) for stage in stages}
    rows = stages[0].geometry.micro_rows * stages[0].geometry.num_shards
    beside = Beside(base_gib=plan.memory.classes.get("base weights", 0.0), eval_rows=rows)
    return with_run(plan, config, stages, times=times, beside=beside)
