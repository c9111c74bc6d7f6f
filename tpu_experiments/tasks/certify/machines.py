"""The full-size training step on each machine that was asked for, by the planner of task=plan."""

import logging
from concurrent.futures import TimeoutError as TookTooLong
from dataclasses import replace

from hydra.core.hydra_config import HydraConfig

from tpu_experiments.config.compose import config_of
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import CertifyTaskConfig, PlanTaskConfig
from tpu_experiments.objectives.base import trained_flops
from tpu_experiments.planning.check import remedies_text
from tpu_experiments.planning.plan import Plan
from tpu_experiments.tasks.certify.checks import NotChecked, Seen
from tpu_experiments.tasks.plan import check_hw, chosen_method
from tpu_experiments.tasks.plan.formulas import arch_of, formula_plan
from tpu_experiments.tasks.plan.search import case_of

log = logging.getLogger(__name__)


def machines_of(config: Config, task: CertifyTaskConfig) -> list[str]:
    """Return the names of the machines: that of `hw=` if it can be planned, and those of `task.machines`."""
    own = [config.hw.name] if config.hw.chip is not None else []
    return list(dict.fromkeys([*own, *task.machines]))


def planned_config(machine: str, *, config: Config) -> Config:
    """Return the command's config with task=plan for a machine; its model is that of `config`.

    Raises:
        ConfigError: there is no such machine, or the batch cannot be divided over it.
    """
    words = [word for word in HydraConfig.get().overrides.task if word.lstrip("+~").partition("=")[0] != "task"]
    words = [word for word in words if not word.lstrip("+~").startswith("task.")]
    found = config_of([*words, "task=plan", f"hw={machine}"])
    return replace(found, name=config.name, model=config.model)


def look_at_step(machine: str, *, config: Config, task: CertifyTaskConfig) -> Seen:
    """Plan the training step: memory, tokens per second and dollars.

    Raises:
        ConfigError: it does not fit, or cannot be planned.
    """
    planned = planned_config(machine, config=config)
    assert isinstance(planned.task, PlanTaskConfig)
    check_hw(planned)
    settings = replace(planned.task, method=task.method, programs="train")
    method = chosen_method(settings, runtime=planned.hw.runtime)
    planned = case_of(replace(planned, task=settings)).config
    require_counted(planned)
    plan, note = step_of(planned, settings, method=method, seconds=60 * task.compile_minutes)
    return seen_of(plan, note=note)


def require_counted(config: Config) -> None:
    """Require the FLOPs of the model to be known, without which there is no plan.

    Raises:
        NotChecked: they are not.
    """
    try:
        trained_flops(config, arch_of(config), seq_len=resolve_stages(config)[0].geometry.seq_len)
    except ConfigError as error:
        raise NotChecked(str(error)) from error


def step_of(config: Config, settings: PlanTaskConfig, *, method: str, seconds: float) -> tuple[Plan, str]:
    """Return the plan of the training step, and why formulas made it; empty where the compiler did.

    Raises:
        ConfigError: there is none.
    """
    if method == "analytic" or config.hw.device == "cuda":
        return formula_plan(config), "by formulas"
    from tpu_experiments.tasks.plan.compiled import compiled_plans  # needs torch_xla

    try:
        (answer,) = compiled_plans([config], settings, which="train", seconds=seconds)
    except TookTooLong:
        return formula_plan(config), f"by formulas, since compiling took more than {seconds / 60:g} minutes"
    if isinstance(answer, ConfigError):
        raise answer
    return answer, ""


def seen_of(plan: Plan, *, note: str) -> Seen:
    """Return a plan as one sentence and its figures.

    Raises:
        ConfigError: the step does not fit.
    """
    shape = f"{plan.global_batch} x {plan.seq_len} tokens a step"
    how = note or f"compiled by libtpu {plan.versions.get('libtpu', 'unknown')}"
    memory = f"{plan.memory.total:.2f} of {plan.memory.limit:.2f} GiB a chip"
    if not plan.fits:
        advice = remedies_text(plan.shortage.remedies if plan.shortage is not None else ())
        raise ConfigError(f"hw={plan.hw.name}; {shape} need {memory} ({how}); {advice}.")
    figures = {
        "method": plan.method,
        "note": note,
        "rows": plan.global_batch,
        "tokens": plan.seq_len,
        "gib": round(plan.memory.total, 4),
        "limit_gib": round(plan.memory.limit, 4),
        "sharding": plan.sharding,
    }
    if plan.time is None:
        return Seen(f"{shape}, {memory} ({how}); the time is not known", figures)
    dollars = plan.usd_per_million_tokens
    figures |= {
        "step_seconds": round(plan.time.total_s, 4),
        "tokens_per_second_per_chip": round(plan.time.tokens_per_second_per_chip),
        "usd_per_million_tokens": dollars.on_demand,
        "usd_per_million_tokens_spot": dollars.spot,
    }
    price = ", ".join(
        f"${value:.3f} {kind}" for kind, value in (("on demand", dollars.on_demand), ("spot", dollars.spot)) if value
    )
    said = f"{shape}, {memory}, {plan.time.tokens_per_second_per_chip:,.0f} tokens/s a chip"
    return Seen(f"{said}, {price or 'no price'} a million tokens ({how})", figures)
