"""Plan one config, or the best of many: the ladder of micro-batches, and the search over settings."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tpu_experiments.config.compose import variant
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.defaults import OPEN, is_open
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.identity import flatten
from tpu_experiments.config.model_schema import ranks_of
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import PlanTaskConfig
from tpu_experiments.config.tuned import value_of
from tpu_experiments.planning.analytic import largest_stage
from tpu_experiments.planning.plan import Plan, Tried, chip_limit_gib
from tpu_experiments.planning.search import Candidate, best_of, combinations, find_largest, in_waves, ranked, rungs
from tpu_experiments.planning.tuned import SET, Line, facts_of, leaves_room, overrides_of, tuned, write_line
from tpu_experiments.tasks.plan.formulas import arch_of, formula_plan
from tpu_experiments.tasks.plan.rollouts import writes_rollouts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Case:
    """Config to plan, and the overrides that derive it from the command's own config."""

    config: Config
    overrides: tuple[str, ...] = ()

    def varied(self, *overrides: str) -> Config:
        """Return the config with further overrides, under the same name."""
        return replace(variant(*self.overrides, *overrides), name=self.config.name)


def case_of(config: Config, *overrides: str) -> Case:
    """Return the case of a config, with open rows set to fit its data and the fastest known settings.

    Tuned settings are left out where the command explores settings itself, and rows per step where it explores the
    rollouts that they are of.
    """
    assert isinstance(config.task, PlanTaskConfig)
    of_rollouts = searches_rollouts(config)
    if config.task.explore != "none" and not of_rollouts:
        config, overrides = replace(config, tuned="off"), (*overrides, "tuned=off")
    if is_open(config):
        # Imports tokenizers and readers, which takes seconds.
        from tpu_experiments.tasks.open_settings import with_open_settings

        found = with_open_settings(config, is_lookup=True)
        keys = [key for key in OPEN if key != "global_batch_rows" or not of_rollouts]
        overrides = (*overrides, *(f"trainer.{key}={getattr(found.trainer, key)}" for key in keys))
    else:
        found = tuned(config)
    return Case(found, (*overrides, *overrides_of(config, found)))


def plans_of(cases: Sequence[Case], settings: PlanTaskConfig, *, method: str) -> list[Plan | ConfigError]:
    """Return a plan of every case, or the error that prevented it."""
    if settings.explore == "none":
        return make_plans([case.config for case in cases], settings, method=method)
    explore = plan_largest_batch if settings.explore == "ladder" else search_settings
    answers: list[Plan | ConfigError] = []
    for case in cases:
        try:
            answers.append(explore(case, settings, method=method))
        except ConfigError as error:
            answers.append(error)
    return answers


def make_plans(
    configs: Sequence[Config], settings: PlanTaskConfig, *, method: str, which: str | None = None
) -> list[Plan | ConfigError]:
    """Return plans made by `method`; those of GPUs are always made by formulas."""
    of_tpus = [config for config in configs if method != "analytic" and config.hw.device != "cuda"]
    if not of_tpus:
        return [formula_plan(config) for config in configs]
    from tpu_experiments.tasks.plan.compiled import compiled_plans  # needs torch_xla

    made = iter(compiled_plans(of_tpus, settings, which=which or settings.programs))
    return [formula_plan(config) if config.hw.device == "cuda" else next(made) for config in configs]


def plan_of_config(config: Config, settings: PlanTaskConfig, *, method: str, which: str | None = None) -> Plan:
    """Return the plan of one config.

    Raises:
        ConfigError: there is none.
    """
    (answer,) = make_plans([config], settings, method=method, which=which)
    if isinstance(answer, ConfigError):
        raise answer
    return answer


def plan_largest_batch(case: Case, settings: PlanTaskConfig, *, method: str) -> Plan:
    """Return the plan with the largest micro-batch that fits, and the rungs tried."""

    def attempt(micro: int) -> Plan:
        config = case.varied(f"trainer.micro_batch_rows={micro}")
        return plan_of_config(config, settings, method=method, which="train")

    first = plan_of_config(case.config, settings, method=method, which="train")
    largest, tried, words = find_largest(first, attempt)
    config = case.config if largest is None else case.varied(f"trainer.micro_batch_rows={largest}")
    plan = plan_of_config(config, settings, method=method)
    return replace(plan, ladder=rungs(first, tried), notes=(words, *plan.notes))


def search_settings(case: Case, settings: PlanTaskConfig, *, method: str) -> Plan:
    """Return the plan with the fastest settings that fit, and every combination tried."""

    of_rollouts = searches_rollouts(case.config)
    if of_rollouts and (method == "analytic" or settings.search.table is not None):
        why = "nothing is compiled here, and formulas know no decoder" if method == "analytic" else ""
        why = why or f"task.search.table={settings.search.table} takes settings of steps"
        raise ConfigError(
            f"task.explore=search with objective={case.config.objective.name}; {why}; task.programs=train searches the "
            "settings of its steps alone."
        )
    which = "all" if of_rollouts else "train"

    def attempt(wave: Sequence[Candidate]) -> list[Tried]:
        answers = make_plans([each.config for each in wave], settings, method=method, which=which)
        return [outcome(each.overrides, answer) for each, answer in zip(wave, answers, strict=True)]

    candidates, left_out = worth_trying(case, settings)
    tried = [*left_out, *in_waves(candidates, attempt)]
    best = best_of(tried)
    if settings.search.table is not None and method == "compiled" and case.config.hw.topology is not None:
        for line in lines_of(case, tried):
            write_line(line, file=Path(settings.search.table))
    config = next((each.config for each in candidates if best and each.overrides == best.overrides), case.config)
    return replace(plan_of_config(config, settings, method=method), search=ranked(tried))


def worth_trying(case: Case, settings: PlanTaskConfig) -> tuple[list[Candidate], list[Tried]]:
    """Return the candidates, and the combinations refused by checks or, by formulas, far above the memory."""
    candidates, left_out, unfolded = [], [], set[str]()
    limit = settings.search.prune_above * chip_limit_gib(case.config.hw)
    arch = arch_of(case.config)
    for point in combinations(axes_of(case.config, settings)):
        try:
            config = case.varied(*point)
        except ConfigError as error:
            left_out.append(Tried(point, "refused", reason=str(error).splitlines()[0]))
            continue
        if config.model.stack == "unrolled" and point:  # folding has no effect: it is the same program
            plain = replace(config.model, remat="none", stack_group=1)
            same = str(flatten(replace(config, model=plain)))
            if same in unfolded:
                continue
            unfolded.add(same)
        total = largest_stage(config, arch, resolve_stages(config))[1].total
        if point and total > limit:
            left_out.append(Tried(point, "pruned", total, reason=f"estimated by formulas at {total:.1f} GiB"))
        else:
            candidates.append(Candidate(point, config))
    return candidates, left_out


def axes_of(config: Config, settings: PlanTaskConfig) -> dict[str, list[Any]]:
    """Return the axes that have values and an effect on this machine."""
    idle = set() if config.hw.parallel == "spmd" else {"sharding"}
    of_rollouts = searches_rollouts(config)
    found = {key: values for key, values in settings.search.axes.items() if values}
    found = {key: values for key, values in found.items() if key.startswith("rollout.") == of_rollouts}
    return {key: values for key, values in found.items() if idle.isdisjoint({key, key.partition(".")[0]})}


def searches_rollouts(config: Config) -> bool:
    """Return whether a search compares rollouts: that of a run on its own answers, unless it is of its steps alone."""
    task = config.task
    is_search = isinstance(task, PlanTaskConfig) and task.explore == "search" and task.programs == "all"
    return is_search and writes_rollouts(config)


def lines_of(case: Case, tried: Sequence[Tried]) -> list[Line]:
    """Return the fastest settings for each `model.stack` that leave room for other programs, as lines of the table."""
    best: dict[str, Line] = {}
    for each in ranked(tried):
        if each.outcome != "fits" or each.step_seconds is None or not isinstance(case.config.task, PlanTaskConfig):
            continue
        if not leaves_room(each.total_gib or 0.0, hw=case.config.hw):
            what = " ".join(each.overrides) or "the command as it is"
            log.warning("%s: no line of the table, %.2f GiB leave too little for other programs", what, each.total_gib)
            continue
        config = case.varied(*each.overrides)
        if config.model.stack not in best:
            best[config.model.stack] = line_of(config, each)
    return list(best.values())


def line_of(config: Config, tried: Tried) -> Line:
    """Return the table line of one combination."""
    stage, _ = largest_stage(config, arch_of(config), resolve_stages(config))
    rows, settled = stage.geometry, {key: value_of(config, key) for key in SET}
    if config.hw.parallel != "spmd":
        del settled["sharding"]
    tokens = rows.global_rows * rows.seq_len
    assert tried.step_seconds is not None
    assert tried.total_gib is not None
    return Line(
        model=config.model.name,
        hw=config.hw.name,
        row_tokens=rows.seq_len,
        micro_tokens=rows.micro_rows * rows.seq_len,
        rank=max(ranks_of(config.lora), default=0),
        targets=tuple(config.lora.targets),
        settings=settled,
        tokens_per_second=round(tokens / tried.step_seconds / config.hw.num_devices, 1),
        step_tokens=tokens,
        hbm_gib=round(tried.total_gib, 2),
        compile_seconds=round(tried.compile_seconds or 0.0, 1),
        facts=facts_of(config),
        libtpu=version("libtpu"),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
    )


def outcome(point: tuple[str, ...], answer: Plan | ConfigError) -> Tried:
    """Return the result of one combination, by the compiler or the formulas."""
    if isinstance(answer, ConfigError):
        return Tried(point, "refused", reason=str(answer))
    total = answer.memory.total
    if not answer.fits:
        return Tried(point, "too large", total, reason=answer.shortage.message if answer.shortage else "")
    seconds = answer.time.total_s if answer.time else None
    if answer.decoding is not None:
        total = max(total, answer.decoding.beside_gib)
    return Tried(point, "fits", total, seconds, answer.compile_seconds, iteration=answer.iteration)
