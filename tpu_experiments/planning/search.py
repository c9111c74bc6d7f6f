"""The combinations of a search, their order, and the overlay that the best of them is written as."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from tpu_experiments.config.overlay import override_of
from tpu_experiments.planning.plan import Plan, Tried

ORDER = ("fits", "too large", "pruned", "refused")


def combinations(axes: Mapping[str, Sequence[Any]]) -> list[tuple[str, ...]]:
    """Overrides of every point; the first is the config as it is."""
    keys = list(axes)
    points = [
        tuple(override_of(key, value) for key, value in zip(keys, values, strict=True))
        for values in itertools.product(*axes.values())
    ]
    return [(), *(point for point in points if point)]


def ranked(tried: Sequence[Tried]) -> tuple[Tried, ...]:
    """The fastest that fit first, then by memory; an estimate that is equal prefers what says its settings."""
    unknown = float("inf")
    return tuple(
        sorted(
            tried,
            key=lambda t: (ORDER.index(t.outcome), t.step_seconds or unknown, t.total_gib or unknown, not t.overrides),
        )
    )


def best_of(tried: Sequence[Tried]) -> Tried | None:
    """The fastest that fits."""
    first = ranked(tried)[0] if tried else None
    return first if first is not None and first.outcome == "fits" else None


def overlay_yaml(plan: Plan) -> str:
    """The best settings of a search as a file for `+plan=`; empty where none is better than as configured."""
    best = best_of(plan.search)
    if best is None or not best.overrides:
        return ""
    own = next((tried for tried in plan.search if not tried.overrides), None)
    before = f"; as configured: {described(own)}" if own else ""
    head = (
        f"# Best of {len(plan.search)} settings for {plan.model} on {plan.hw.name} ({plan.method}): {described(best)}"
        f"{before}.\n# The same command with +plan=THIS_FILE takes them; what the command line says wins.\n"
    )
    values = dict(override.split("=", 1) for override in best.overrides)
    return head + yaml.safe_dump({key: yaml.safe_load(value) for key, value in values.items()}, sort_keys=False)


def described(tried: Tried) -> str:
    """Outcome with its figures."""
    if tried.step_seconds is None or tried.total_gib is None:
        return tried.outcome
    return f"{tried.step_seconds:.3f} s a step (estimate), {tried.total_gib:.2f} GiB per chip"
