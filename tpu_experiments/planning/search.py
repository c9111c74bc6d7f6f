"""Searches over settings: the ladder of micro-batches, combinations in waves, and the overlay of the best."""

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from tpu_experiments.config.commands import override_of
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.identity import flatten
from tpu_experiments.config.schema import Config
from tpu_experiments.config.trust import search_keys
from tpu_experiments.planning.plan import ChipMemory, Plan, Rung, Tried

Try = Callable[[int], Plan]
"""Maps rows per chip to the plan with that micro-batch."""


def rungs_of(plan: Plan) -> list[int]:
    """Return the micro-batches that divide the rows a chip has of the global batch."""
    rows = plan.micro_batch * plan.accumulation
    return [n for n in range(1, rows + 1) if rows % n == 0]


def predicted_gib(memory: ChipMemory, *, micro: int, at: int) -> float:
    """Predict the memory with `micro` rows, from `memory` with `at` rows.

    All temporaries are taken to grow with the rows.
    """
    return memory.arguments + memory.outputs + memory.temporaries * micro / at


def find_largest(first: Plan, attempt: Try) -> tuple[int | None, dict[int, Plan], str]:
    """Find the largest micro-batch that compiles within the memory.

    It begins at the prediction and goes up to the first that does not fit, or down to the first that does.

    Returns:
        The micro-batch, None where not even one row fits; every plan made; and a sentence on how well the first
        compilation predicted it.
    """
    sizes, plans = rungs_of(first), {first.micro_batch: first}

    def fits(position: int) -> bool:
        micro = sizes[position]
        if micro not in plans:
            plans[micro] = attempt(micro)
        return plans[micro].fits

    limit = first.memory.limit
    within = [n for n in sizes if predicted_gib(first.memory, micro=n, at=first.micro_batch) <= limit]
    guess = at = sizes.index(within[-1]) if within else 0
    if fits(at):
        while at + 1 < len(sizes) and fits(at + 1):
            at += 1
    else:
        while at > 0 and not fits(at - 1):
            at -= 1
        at -= 1
    if at < 0:
        return (
            None,
            plans,
            f"micro-batch: none fits, the head-room of {first.micro_batch} rows predicted {sizes[guess]}",
        )
    words = (
        f"micro-batch: the largest that fits is {sizes[at]} rows per chip; the head-room of {first.micro_batch} "
        f"predicted {sizes[guess]}, {abs(at - guess)} steps of the ladder away"
    )
    return sizes[at], plans, words


def rungs(first: Plan, plans: dict[int, Plan]) -> tuple[Rung, ...]:
    """Return every try, the smallest first."""
    return tuple(
        Rung(
            micro_batch=micro,
            total_gib=plan.memory.total,
            fits=plan.fits,
            predicted_gib=None if plan is first else predicted_gib(first.memory, micro=micro, at=first.micro_batch),
        )
        for micro, plan in sorted(plans.items())
    )


ORDER = ("fits", "too large", "pruned", "refused")
MICRO_BATCH = "trainer.micro_batch_rows"


@dataclass(frozen=True)
class Candidate:
    """One combination to be compiled."""

    overrides: tuple[str, ...]
    config: Config

    @property
    def rows(self) -> int:
        """Rows per chip that pass through the model at once, in the stage that has the most."""
        return max(stage.geometry.micro_rows for stage in resolve_stages(self.config))

    @property
    def others(self) -> str:
        """Every setting but the micro-batch."""
        flat = flatten(self.config)
        return json.dumps({key: value for key, value in flat.items() if key != MICRO_BATCH}, default=str)


Attempt = Callable[[Sequence[Candidate]], Sequence[Tried]]
"""Maps candidates, tried concurrently, to the compiler's answers."""


def combinations(axes: Mapping[str, Sequence[Any]]) -> list[tuple[str, ...]]:
    """Return the overrides of every point; the first is the config unchanged."""
    keys = list(axes)
    points = [
        tuple(override_of(key, value) for key, value in zip(keys, values, strict=True))
        for values in itertools.product(*axes.values())
    ]
    return [(), *(point for point in points if point)]


def in_waves(candidates: Sequence[Candidate], attempt: Attempt) -> list[Tried]:
    """Try or prune every candidate, in waves of the smallest micro-batch left for each other setting.

    Where some rows were too large, more rows with the same other settings are not tried. The unchanged config always
    is, in the first wave.
    """
    tried: list[Tried] = []
    too_large: dict[str, int] = {}
    waiting: defaultdict[str, list[Candidate]] = defaultdict(list)
    for candidate in sorted(candidates, key=lambda candidate: candidate.rows):
        if candidate.overrides:
            waiting[candidate.others].append(candidate)
    wave = [candidate for candidate in candidates if not candidate.overrides]
    while wave or any(waiting.values()):
        for others, queue in waiting.items():
            limit = too_large.get(others)
            if limit is not None:
                tried += [pruned(each, limit) for each in queue if each.rows > limit]
                queue[:] = [each for each in queue if each.rows <= limit]
            wave += [queue.pop(0)] if queue else []
        for candidate, answer in zip(wave, attempt(wave) if wave else [], strict=True):
            tried.append(answer)
            if answer.outcome == "too large":
                too_large[candidate.others] = min(candidate.rows, too_large.get(candidate.others, candidate.rows))
        wave = []
    return tried


def pruned(candidate: Candidate, limit: int) -> Tried:
    """Return the outcome of a candidate with more rows than the `limit` that was too large already."""
    return Tried(candidate.overrides, "pruned", reason=f"{limit} rows were too large")


def ranked(tried: Sequence[Tried]) -> tuple[Tried, ...]:
    """Sort the fastest that fit first, then by memory; in a tie explicit settings come first."""
    unknown = float("inf")
    return tuple(
        sorted(
            tried,
            key=lambda t: (
                ORDER.index(t.outcome),
                t.compared_seconds or unknown,
                t.total_gib or unknown,
                not t.overrides,
            ),
        )
    )


def best_of(tried: Sequence[Tried]) -> Tried | None:
    """Return the fastest that fits; None where none does."""
    first = ranked(tried)[0] if tried else None
    return first if first is not None and first.outcome == "fits" else None


def overlay_yaml(plan: Plan) -> str:
    """Return the best settings of a search as a file for `+plan=`; empty where none beats the config."""
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


def typed_words(plan: Plan) -> list[str]:
    """Return the best settings that `+plan=` does not take: those of axes that the command itself added."""
    best = best_of(plan.search)
    words = best.overrides if best else ()
    return [word for word in words if word.partition("=")[0] not in search_keys()]


def described(tried: Tried) -> str:
    """Format an outcome with its figures."""
    if tried.step_seconds is None or tried.total_gib is None:
        return tried.outcome
    speed = f"{tried.step_seconds:.3f} s a step"
    if tried.iteration is not None:
        speed = f"{tried.iteration.answers_per_second:,.0f} answers/s"
    return f"{speed} (estimate), {tried.total_gib:.2f} GiB per chip"
