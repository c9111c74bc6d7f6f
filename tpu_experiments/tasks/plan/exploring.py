"""One plan of a config, or the best of many: the ladder of micro-batches, and the search."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.planning import PlanTaskConfig
from tpu_experiments.config.rows import OPEN, is_open
from tpu_experiments.config.schema import Config
from tpu_experiments.config.variants import variant
from tpu_experiments.planning.analytic import largest_stage
from tpu_experiments.planning.ladder import climb, rungs
from tpu_experiments.planning.plan import Plan, Tried, chip_limit_gib
from tpu_experiments.planning.search import Candidate, best_of, combinations, in_waves, ranked
from tpu_experiments.tasks.plan.formulas import arch_of, formula_plan


@dataclass(frozen=True)
class Case:
    """A config to plan, and the overrides that make it of the command's own."""

    config: Config
    overrides: tuple[str, ...] = ()

    def varied(self, *overrides: str) -> Config:
        """The same with further overrides, under the same name."""
        return replace(variant(*self.overrides, *overrides), name=self.config.name)


def case_of(config: Config, *overrides: str) -> Case:
    """The case of a config, with the rows that its data asks for where it leaves them open."""
    if not is_open(config):
        return Case(config, overrides)
    from tpu_experiments.training.row_lengths import settle  # tokenizers and readers take seconds to load

    found = settle(config, is_lookup=True)
    rows = (f"trainer.{key}={getattr(found.trainer, key)}" for key in OPEN)
    return Case(found, (*overrides, *rows))


def plans_of(cases: Sequence[Case], settings: PlanTaskConfig, *, method: str) -> list[Plan | ConfigError]:
    """A plan of every case, or why there is none."""
    if settings.explore == "none":
        return made([case.config for case in cases], settings, method=method)
    explore = laddered if settings.explore == "ladder" else searched
    answers: list[Plan | ConfigError] = []
    for case in cases:
        try:
            answers.append(explore(case, settings, method=method))
        except ConfigError as error:
            answers.append(error)
    return answers


def made(
    configs: Sequence[Config], settings: PlanTaskConfig, *, method: str, which: str | None = None
) -> list[Plan | ConfigError]:
    """Plans by the method."""
    if method == "analytic":
        return [formula_plan(config) for config in configs]
    from tpu_experiments.tasks.plan.compiled import compiled_plans  # needs torch_xla

    folder = settings.compiled_folder
    return compiled_plans(configs, which=which or settings.programs, workers=settings.workers, folder=folder)


def the_plan(config: Config, settings: PlanTaskConfig, *, method: str, which: str | None = None) -> Plan:
    """The plan of one config.

    Raises:
        ConfigError: there is none.
    """
    (answer,) = made([config], settings, method=method, which=which)
    if isinstance(answer, ConfigError):
        raise answer
    return answer


def laddered(case: Case, settings: PlanTaskConfig, *, method: str) -> Plan:
    """The plan with the largest micro-batch that fits, and the rungs tried on the way."""

    def attempt(micro: int) -> Plan:
        config = case.varied(f"trainer.micro_batch_rows={micro}")
        return the_plan(config, settings, method=method, which="train")

    first = the_plan(case.config, settings, method=method, which="train")
    largest, tried, words = climb(first, attempt)
    config = case.config if largest is None else case.varied(f"trainer.micro_batch_rows={largest}")
    plan = the_plan(config, settings, method=method)
    return replace(plan, ladder=rungs(first, tried), notes=(words, *plan.notes))


def searched(case: Case, settings: PlanTaskConfig, *, method: str) -> Plan:
    """The plan with the fastest settings that fit, and every combination that was looked at."""

    def attempt(wave: Sequence[Candidate]) -> list[Tried]:
        answers = made([each.config for each in wave], settings, method=method, which="train")
        return [outcome(each.overrides, answer) for each, answer in zip(wave, answers, strict=True)]

    candidates, left_out = worth_trying(case, settings)
    tried = [*left_out, *in_waves(candidates, attempt)]
    best = best_of(tried)
    config = next((each.config for each in candidates if best and each.overrides == best.overrides), case.config)
    return replace(the_plan(config, settings, method=method), search=ranked(tried))


def worth_trying(case: Case, settings: PlanTaskConfig) -> tuple[list[Candidate], list[Tried]]:
    """The combinations of the axes, and those that the checks refuse or formulas put far above the memory."""
    candidates, left_out = [], []
    limit = settings.search.prune_above * chip_limit_gib(case.config.hw)
    arch = arch_of(case.config)
    for point in combinations(axes_of(case.config, settings)):
        try:
            config = case.varied(*point)
        except ConfigError as error:
            left_out.append(Tried(point, "refused", reason=str(error).splitlines()[0]))
            continue
        total = largest_stage(config, arch)[1].total
        if point and total > limit:
            left_out.append(Tried(point, "pruned", total, reason=f"formulas put it at {total:.1f} GiB"))
        else:
            candidates.append(Candidate(point, config))
    return candidates, left_out


def axes_of(config: Config, settings: PlanTaskConfig) -> dict[str, list[Any]]:
    """The axes that have values and make a difference on this machine."""
    idle = set() if config.hw.parallel == "spmd" else {"sharding"}
    idle |= set() if config.model.stack == "scanned" else {"model.remat", "model.stack_group"}
    axes = settings.search.axes
    return {key: values for key, values in axes.items() if values and idle.isdisjoint({key, key.partition(".")[0]})}


def outcome(point: tuple[str, ...], answer: Plan | ConfigError) -> Tried:
    """What the compiler (or the formulas) said of one combination."""
    if isinstance(answer, ConfigError):
        return Tried(point, "refused", reason=str(answer))
    total = answer.memory.total
    if not answer.fits:
        return Tried(point, "too large", total, reason=answer.shortage.message if answer.shortage else "")
    return Tried(point, "fits", total, answer.time.total_s if answer.time else None)
