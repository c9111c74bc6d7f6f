"""The same run on a machine that is not compiled for: one more row beside the plan, from the machine's datasheet."""

from dataclasses import replace

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.planning.money import Cost, Dollars, RunLength, cost_of, usd_per_million_tokens
from tpu_experiments.planning.plan import Comparison
from tpu_experiments.planning.timing import Calibration, datasheet_time
from tpu_experiments.planning.work import FlopsPerToken

SHARE_OF_PEAK = 0.35
"""Assumed for a machine of which only the datasheet is known; nothing published tells it for LoRA on a T4."""


def datasheet_comparison(
    hw: HwConfig,
    *,
    flops: FlopsPerToken,
    tokens_per_step: int,
    run: RunLength | None = None,
    fits: bool | None = None,
    share_of_peak: float = SHARE_OF_PEAK,
) -> Comparison:
    """Time and money of `run` on `hw` at a share of its peak.

    Stages keep their tokens; evaluation takes as much longer as a step does, checkpoints and set-up as long as in
    `run`, and nothing is compiled.

    Args:
        tokens_per_step: of the global batch.
        fits: what is known of its memory, for example from `work.analytic_memory`.

    Raises:
        ConfigError: the machine has no datasheet.
    """
    if hw.chip is None:
        raise ConfigError(f"hw={hw.name}; it has no datasheet to compare with; fill in hw.chip.")
    step = datasheet_time(flops, tokens=tokens_per_step / hw.num_devices, chip=hw.chip, share_of_peak=share_of_peak)
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
        assumption=f"{hw.name}: FLOPs at an assumed {100 * share_of_peak:.0f} % of the datasheet's peak",
    )


def _cost_there(run: RunLength, *, hw: HwConfig, tokens_per_second: float) -> Cost:
    stages = tuple(replace(s, step_seconds=s.tokens / s.steps / tokens_per_second) for s in run.stages)
    slower = sum(s.seconds for s in stages) / run.parts["training"]
    there = replace(run, stages=stages, compile_seconds=0.0, eval_seconds=run.eval_seconds * slower)
    return cost_of(there, price=hw.price, num_devices=hw.num_devices, calibration=Calibration())
