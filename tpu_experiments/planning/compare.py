"""The same job on other machines, as rows beside the plan: by saved plans, or by a datasheet."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.metrics.flops import FlopsPerToken
from tpu_experiments.planning.money import Cost, Dollars, RunLength, cost_of, usd_per_million_tokens
from tpu_experiments.planning.plan import Comparison, Plan
from tpu_experiments.planning.stored_plans import saved_plans
from tpu_experiments.planning.timing import Calibration, datasheet_time

SHARE_OF_PEAK = 0.35
"""Assumed for a machine of which only the datasheet is known; nothing is published for LoRA on these."""


def saved_comparisons(plan: Plan, *, folder: str) -> tuple[Comparison, ...]:
    """Return the saved plans of the same job for other machines; of each machine the fastest that fits."""
    found: dict[str, Comparison] = {}
    for saved in saved_plans(folder):
        if saved.fields.get("job") != plan.job or saved.fields["hw"] == plan.hw.name:
            continue
        row = comparison_of(saved.fields)
        known = found.get(row.hw)
        if known is None or (row.step_seconds or float("inf")) < (known.step_seconds or float("inf")):
            found[row.hw] = row
    return tuple(found.values())


def comparison_of(fields: Mapping[str, Any]) -> Comparison:
    """Return the row of a saved plan, from the content of its plan.json."""
    per_chip, million = fields["tokens_per_second_per_chip"], fields["usd_per_million_tokens"]
    return Comparison(
        hw=fields["hw"],
        chips=fields["chips"],
        fits=fields["fits"],
        step_seconds=fields["estimated_step_seconds"],
        tokens_per_second=None if per_chip is None else per_chip * fields["chips"],
        hours=fields["hours"],
        usd=Dollars(**fields["usd"]),
        usd_per_million_tokens=Dollars(fields["usd_per_million_tokens_spot"], million),
        method=fields["method"],
    )


def datasheet_comparison(
    hw: HwConfig,
    *,
    flops: FlopsPerToken,
    tokens_per_step: int,
    run: RunLength | None = None,
    fits: bool | None = None,
) -> Comparison:
    """Estimate time and cost of `run` on `hw` at `SHARE_OF_PEAK`.

    Stages keep their tokens; evaluation scales with the step, checkpoints and set-up take as long as in `run`, and
    nothing is compiled.

    Args:
        tokens_per_step: tokens of the global batch.
        fits: whether its memory suffices, for example by `work.analytic_memory`; no time is estimated where it does
            not.

    Raises:
        ConfigError: the machine has no datasheet.
    """
    if hw.chip is None:
        raise ConfigError(f"hw={hw.name}; it has no datasheet to compare with; fill in hw.chip.")
    if fits is False:
        return _too_small(hw, chip=hw.chip.name)
    step = datasheet_time(flops, tokens=tokens_per_step / hw.num_devices, chip=hw.chip, share_of_peak=SHARE_OF_PEAK)
    speed = step.tokens_per_second_per_chip * hw.num_devices
    cost = _cost_there(run, hw=hw, tokens_per_second=speed) if run else None
    return Comparison(
        hw=hw.name,
        chips=hw.num_devices,
        fits=fits,
        step_seconds=step.total_s,
        tokens_per_second=speed,
        hours=cost.hours if cost else None,
        usd=cost.usd if cost else Dollars(None, None),
        usd_per_million_tokens=usd_per_million_tokens(step, price=hw.price),
        method=step.method,
        assumption=f"{hw.name}: FLOPs at an assumed {100 * SHARE_OF_PEAK:.0f} % of the datasheet's peak",
    )


def _too_small(hw: HwConfig, *, chip: str) -> Comparison:
    nothing = Dollars(None, None)
    words = f"{hw.name}: by formulas the step does not fit into a {chip}'s memory, one row at a time"
    return Comparison(
        hw.name, hw.num_devices, False, None, None, None, nothing, nothing, method="datasheet", assumption=words
    )


def _cost_there(run: RunLength, *, hw: HwConfig, tokens_per_second: float) -> Cost:
    stages = tuple(replace(s, step_seconds=s.tokens / s.steps / tokens_per_second) for s in run.stages)
    slower = sum(s.seconds for s in stages) / run.parts["training"]
    evaluating, reference = run.eval_seconds * slower, run.reference_seconds * slower
    there = replace(run, stages=stages, compile_seconds=0.0, eval_seconds=evaluating, reference_seconds=reference)
    return cost_of(there, price=hw.price, num_devices=hw.num_devices, calibration=Calibration())
