"""Compare a plan's estimates with the run's measurements, for result.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PlanEstimates:
    """Estimates of a plan, made before the run starts."""

    source: str | None = None
    """`compiled` or `analytic`; None without a plan."""
    file: str | None = None
    """Path of plan.json; None where the formulas were evaluated for this run."""
    step_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of one optimizer step by stage name; a stage may be missing."""
    hbm_gib: float | None = None
    """GiB that stay allocated on a chip between steps."""
    compile_seconds: float | None = None
    """Seconds to compile all programs of a run, on the machine that planned."""
    reason: str = ""
    """Why there is no plan, or no time in it."""
    compile_reason: str = ""
    """Why compile seconds are unknown."""
    tuned: dict[str, Any] | None = None
    """Line of conf/tuned.yaml that the run takes its settings from; None without one."""


@dataclass(frozen=True)
class Measured:
    """Measurements of one start of a run."""

    steps: Mapping[str, int]
    """Optimizer steps by stage name."""
    step_tokens: Mapping[str, int]
    """Tokens of one step by stage name, including padding, as a plan counts them."""
    train_seconds: float | None
    """Seconds of those steps without compilation."""
    hbm_gib: float | None
    """GiB in use on one chip when the run ends; None where the device does not report it."""
    compile_seconds: float
    num_devices: int


def compared_with_plan(estimates: PlanEstimates, measured: Measured) -> dict[str, Any]:
    """Return the field `plan`: planned, measured and their ratio for every figure; null with a reason."""
    steps = sum(measured.steps.values())
    tokens = sum(count * measured.step_tokens[stage] for stage, count in measured.steps.items())
    is_timed = steps > 0 and all(stage in estimates.step_seconds for stage in measured.steps)
    planned = sum(n * estimates.step_seconds[s] for s, n in measured.steps.items()) if is_timed else None
    spent = measured.train_seconds if steps else None
    chips = measured.num_devices
    untimed = estimates.reason or ("" if is_timed else "the plan has no time of a stage of this run")
    if not steps:
        untimed = "no step was trained since the last start"
    return {
        "source": estimates.source,
        "file": estimates.file,
        "reason": estimates.reason or None,
        "step_seconds": _figure(planned and planned / steps, spent and spent / steps, reason=untimed),
        "tokens_per_second_per_chip": _figure(
            planned and tokens / planned / chips, spent and tokens / spent / chips, reason=untimed
        ),
        "hbm_gib": _figure(
            estimates.hbm_gib,
            measured.hbm_gib,
            reason=estimates.reason if estimates.hbm_gib is None else "the device does not report its memory",
        ),
        "compile_seconds": _figure(
            estimates.compile_seconds, measured.compile_seconds, reason=estimates.reason or estimates.compile_reason
        ),
    }


def plan_line(plan: Mapping[str, Any] | None) -> list[str]:
    """Return the line of the closing summary; empty where either side is unknown."""
    step = plan["step_seconds"] if plan else {}
    if plan is None or step["ratio"] is None:
        return []
    return [
        f"  planned         {step['planned']:.3g} s a step ({plan['source']}), measured {step['measured']:.3g}: "
        f"{step['ratio']:,.2f} times as long"
    ]


def _figure(planned: float | None, measured: float | None, *, reason: str) -> dict[str, Any]:
    is_known = bool(planned) and measured is not None
    ratio = measured / planned if planned and measured is not None else None
    return {"planned": planned, "measured": measured, "ratio": ratio, "reason": None if is_known else reason}
