"""Which points of a sweep train in one program (training/pack.py), and what separates the others."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.defaults import is_open, with_lengths
from tpu_experiments.config.identity import flatten
from tpu_experiments.config.packs import why_alone
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import PlanTaskConfig
from tpu_experiments.planning.analytic import largest_stage, step_settings
from tpu_experiments.planning.length import assumed_steps
from tpu_experiments.planning.plan import chip_limit_gib
from tpu_experiments.planning.stored_plans import SavedPlan, known_plan, sizes_of
from tpu_experiments.planning.tuned import tuned
from tpu_experiments.planning.work import analytic_memory
from tpu_experiments.storage.run_folder import has_begun, with_settings_of_run
from tpu_experiments.sweeping.points import Point

OF_EACH = ("lora.r", "lora.alpha", "lora.dropout", "lora.scaling", "lora.init", "optim.", "schedule.", "seed", "name")
"""Keys, or beginnings of keys, in which points of one pack may differ."""
COUNTS = "sweeping.pack: in one program each: "
MAX_POINTS = 8
"""Largest pack of `auto`: of the start and the compilation, an eighth a point is left."""
MARGIN = 1.25
"""Factor of the formulas' temporaries (planning/work.py), for safety: compiled ones of packs of eight were 0.55 to 0.87
times as large (tests/benchmarks/LOG.md, Memory counted twice)."""
START_SECONDS = 20.0
"""Seconds of a process before it compiles; assumed (tests/benchmarks/RESULTS.md, "Several points in one program")."""


def settled(points: Sequence[Point]) -> list[Point]:
    """Return the points with the speed settings that their own processes will choose (tasks/train.py).

    Their rows are those of a begun run, else what the config knows of its data: to measure it takes the tokenizer, and
    torch_xla with it, which has no place in a process that starts others. Without a chip whose memory is known the
    points are returned as they are.
    """
    if points[0].config.hw.chip is None:
        return list(points)
    found = []
    for point in points:
        config, is_begun = point.config, False
        if config.task.name == "train":
            config, is_begun = with_settings_of_run(config), has_begun(config)
        config = with_lengths(config, None) if is_open(config) else config
        found.append(replace(point, config=tuned(config, is_begun=is_begun, is_logged=False)))
    return found


def packs_of(points: Sequence[Point], *, largest: int) -> list[list[Point]]:
    """Return the points by the process that trains them, in the order of the first of each.

    Args:
        largest: points of one process, at most.
    """
    groups: dict[Any, list[Point]] = {}
    for number, point in enumerate(points):
        alone = largest == 1 or why_alone(point.config) is not None
        groups.setdefault(number if alone else tuple(sorted(_common(point.config).items())), []).append(point)
    return [group[start : start + largest] for group in groups.values() for start in range(0, len(group), largest)]


def chosen_size(points: Sequence[Point]) -> tuple[int, str]:
    """Return the largest number of points in one process by `sweeping.pack`, and for `auto` the reason.

    `auto` takes the number whose compiled plans let the sweep end first, where the points alone and a pack have such
    plans (`task=plan -m ... sweeping.pack=auto`). Otherwise it takes as many as are estimated to fit the chips, at most
    MAX_POINTS, and fewer, so that `points_at_once` packs share the points: a step of k adapters was never planned to
    take more than k steps of one, and start and compilation are paid once.
    """
    first = points[0].config
    chosen, at_once = first.sweeping.pack, first.sweeping.points_at_once
    if chosen != "auto":
        return int(chosen), ""
    largest, why = MAX_POINTS, f"at most {MAX_POINTS}"
    if first.hw.chip is not None:
        configs = [point.config for point in points]
        fastest = _fastest(configs, at_once=at_once)
        if fastest is not None:
            return fastest
        largest, why = _fitting(configs)
    elif first.hw.device != "cpu":
        return 1, f"hw={first.hw.name} has no chip whose memory is known"
    even = math.ceil(len(points) / at_once)
    if even < largest:
        return even, f"{len(points)} points in {at_once} at a time (sweeping.points_at_once)" if at_once > 1 else ""
    return largest, why


def _fastest(configs: Sequence[Config], *, at_once: int) -> tuple[int, str] | None:
    """Return the number of points in a process with which compiled plans end the sweep first, and why.

    None where the points alone or all packs have no plan, or the length of a run is not known.
    """
    widest = max(configs, key=lambda config: config.lora.r)
    arch = sizes_of(widest.model)
    if arch is None:
        return None
    seconds = {}
    for size in range(1, min(MAX_POINTS, len(configs)) + 1):
        plan = _planned(widest, arch, size=size)
        each = None if plan is None or not plan.fields["fits"] else _seconds_of(widest, plan)
        if each is not None:
            seconds[size] = each
        elif size == 1:
            return None
    if len(seconds) == 1:
        return None
    ends = {size: _makespan(len(configs), size=size, seconds=seconds, at_once=at_once) for size in seconds}
    best = min(ends, key=lambda size: ends[size])
    others = ", ".join(f"{ends[size]:,.0f} s with {size}" for size in ends if size != best)
    return best, f"by compiled plans {len(configs)} points end in {ends[best]:,.0f} s with {best} in one, {others}"


def _seconds_of(config: Config, plan: SavedPlan) -> float | None:
    """Return the seconds of a process by its plan: start, compilation of its training programs, and steps.

    None where the plan has no time for a stage or the length of the run is not known.
    """
    seconds = START_SECONDS
    of_stages = {}
    for program in plan.fields["programs"]:
        if program["name"] == "train":
            seconds += program["compile_seconds"] or 0.0
            of_stages.update(dict.fromkeys(program["stages"], program["estimated_seconds"]))
    for stage in resolve_stages(config):
        step, num_steps = of_stages.get(stage.name), stage.steps or assumed_steps(config, stage)
        if step is None or num_steps is None:
            return None
        seconds += num_steps * step
    return seconds


def _makespan(num: int, *, size: int, seconds: dict[int, float], at_once: int) -> float:
    """Return the seconds of a sweep of `num` points whose processes have `size` points, `at_once` at a time.

    A last process with fewer points takes the time of its own plan, or of one of `size` without one.
    """
    whole, rest = divmod(num, size)
    each = [seconds[size]] * whole + [seconds.get(rest, seconds[size])] * (rest > 0)
    return max(sum(each[start::at_once]) for start in range(min(at_once, len(each))))


def _fitting(configs: Sequence[Config]) -> tuple[int, str]:
    """Return how many of the points of the largest rank are estimated to fit a program, at least 1, and why."""
    widest = max(configs, key=lambda config: config.lora.r)
    arch = sizes_of(widest.model)
    if arch is None:
        return 1, "the model's sizes are not known"
    largest, why = 1, "no two fit"
    for size in range(2, MAX_POINTS + 1):
        gib, how = _gib_of(widest, arch, size=size)
        if gib <= chip_limit_gib(widest.hw):
            largest, why = size, f"{how} at {_of_chip(gib, widest)}; at most {MAX_POINTS}"
    return largest, why


def shortage_text(points: Sequence[Point]) -> str | None:
    """Return a sentence where a pack of these points is not estimated to fit its chips, with the size that is."""
    widest = max((point.config for point in points), key=lambda config: config.lora.r)
    arch = sizes_of(widest.model)
    if arch is None or widest.hw.chip is None or len(points) == 1:
        return None
    gib, how = _gib_of(widest, arch, size=len(points))
    if gib <= chip_limit_gib(widest.hw):
        return None
    fits = [n for n in range(2, len(points)) if _gib_of(widest, arch, size=n)[0] <= chip_limit_gib(widest.hw)]
    return (
        f"sweeping.pack={widest.sweeping.pack}; {len(points)} points in one program are {how} at "
        f"{_of_chip(gib, widest)}; use sweeping.pack={max(fits) if fits else 'off'}"
    )


def _gib_of(config: Config, arch: Any, *, size: int) -> tuple[float, str]:
    """Return the GiB per chip of a pack of points like this one, and whether they are compiled or estimated."""
    plan = _planned(config, arch, size=size)
    if plan is None:
        return _memory_of(config, arch, size=size), "estimated"
    return float(plan.fields["hbm_gib_per_chip"]["total"]), "compiled"


def _of_chip(gib: float, config: Config) -> str:
    return f"{gib:.2f} of {chip_limit_gib(config.hw):.2f} GiB per chip"


def _planned(config: Config, arch: Any, *, size: int) -> SavedPlan | None:
    """Return the compiled plan of the pack (`pack_plans`), or with size=1 of a point alone; None without one."""
    if config.hw.topology is None:
        return None
    return known_plan(replace(config, task=PlanTaskConfig("plan", pack=size)), arch, resolve_stages(config))


def _memory_of(config: Config, arch: Any, *, size: int) -> float:
    """Return the GiB per chip that a pack of points like this one is estimated to take."""
    geometry = largest_stage(config, arch, resolve_stages(config))[0].geometry
    rows = replace(geometry, micro_rows=size * geometry.micro_rows)
    memory = analytic_memory(arch, step=step_settings(config, rows))
    resident = memory.base + memory.batch + size * (memory.adapters + memory.optimizer)
    return resident + MARGIN * (memory.temporaries + (size - 1) * memory.gradients)


def pack_plans(packs: Sequence[Sequence[Point]]) -> list[Point]:
    """Return for every pack of several points a point that plans its program, with the largest rank for each."""
    found = []
    for number, pack in enumerate((pack for pack in packs if len(pack) > 1), start=1):
        widest = max(pack, key=lambda point: point.config.lora.r)
        name = f"pack_{number}_of_{len(pack)}"
        more = (f"task.pack={len(pack)}",)
        config = replace(widest.config, name=name, task=replace(widest.config.task, pack=len(pack)))  # type: ignore[call-arg]
        members, overrides = tuple(point.name for point in pack), (*widest.overrides, *more)
        found.append(Point(name, {}, overrides, config, members, widest.options))
    return found


def packs_text(packs: Sequence[Sequence[Point]]) -> Iterator[str]:
    """Describe the packs in a sentence, and one for each reason for which points are not together."""
    sizes = Counter(len(pack) for pack in packs)
    counts = ", ".join(
        f"{count} pack{'s' * (count > 1)} of {size} points" if size > 1 else f"{count} alone"
        for size, count in sorted(sizes.items(), reverse=True)
    )
    yield f"{COUNTS}{counts}"
    reasons = {why_alone(pack[0].config) for pack in packs if len(pack) == 1}
    yield from (f"sweeping.pack: a point trains alone, since {reason}" for reason in sorted(filter(None, reasons)))
    common = [_common(pack[0].config) for pack in packs if why_alone(pack[0].config) is None]
    keys = [key for key in dict.fromkeys(key for each in common for key in each) if _differs(key, common)]
    if keys:
        yield f"sweeping.pack: points of different packs differ in {', '.join(keys)}"


def _differs(key: str, values: Sequence[dict[str, str]]) -> bool:
    return len({each.get(key) for each in values}) > 1


def _common(config: Config) -> dict[str, str]:
    """Return the settings that all points of a pack have in common, as text."""
    of_each = (*OF_EACH, *(f"objective.{name}" for name in config.objective.inputs()))
    found = {key: str(value) for key, value in flatten(config).items() if not key.startswith((*of_each, "tuned"))}
    if config.model.init == "random" or config.model.size == "tiny":
        found["seed"] = str(config.seed)  # it draws the base
    return found
