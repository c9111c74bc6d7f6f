"""The fastest known settings of a job: lines of conf/tuned.yaml, which searches of task=plan wrote.

A line is one compiled training step of a model on a machine, with the planned figures of its settings. It applies to
runs whose rows are no longer, whose rank is no higher and whose micro-batches have no more tokens, all else being
equal: their step needs no more memory. None applies to runs that train more than plain adapters of projections. An
objective whose step costs what another one's does takes the lines of both (`ObjectiveConfig.planned_as`). Of the lines
that apply, the one with the shortest run is chosen, compilation included. Where none does, formulas choose what the
step saves (planning/saving.py).
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tpu_experiments.config.commands import override_of
from tpu_experiments.config.compose import CONF, sharding_table
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.defaults import fitting_rows, is_open
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.mesh import num_shards
from tpu_experiments.config.model_schema import ranks_of
from tpu_experiments.config.schema import Config
from tpu_experiments.config.trust import setting_problem
from tpu_experiments.config.tuned import KEPT, SPEED, given, value_of, with_values
from tpu_experiments.planning.length import assumed_steps
from tpu_experiments.planning.plan import chip_limit_gib
from tpu_experiments.planning.saving import BESIDE_GIB, with_saving
from tpu_experiments.planning.stored_plans import digest_of, program_facts, sizes_of

log = logging.getLogger(__name__)
TABLE = CONF / "tuned.yaml"
MICRO = "trainer.micro_batch_rows"
SET = tuple(key for key in SPEED if key != MICRO)
"""Settings of a line; its micro-batch is counted in tokens."""
FREE = ("lora.", "optim.", "sample.", "sharding.", "trainer.", "hw.rent.", *SET)
"""Facts in which a run may differ from a line: those of them that take memory are compared one by one."""


@dataclass(frozen=True)
class Line:
    """One compiled training step."""

    model: str
    hw: str
    row_tokens: int
    """Longest row that it applies to."""
    micro_tokens: int
    """Tokens of a micro-batch on one chip."""
    rank: int
    """Highest rank of the adapter that it applies to."""
    targets: tuple[str, ...]
    settings: Mapping[str, Any]
    tokens_per_second: float
    """Tokens per second of one chip, planned."""
    step_tokens: int
    """Tokens of the planned step."""
    hbm_gib: float
    """GiB of one chip, planned."""
    compile_seconds: float
    facts: str
    """Digest of everything else that the program depends on."""
    libtpu: str
    date: str

    @property
    def words(self) -> str:
        """The settings in the form that the command line takes."""
        return words_of(self.settings)


def tuned(
    config: Config, *, totals: Mapping[str, int | None] | None = None, is_begun: bool = False, is_logged: bool = True
) -> Config:
    """Return the config with the settings of the line that makes its run shortest, else with those of formulas.

    Args:
        totals: tokens of the sources, where they were measured; by default `data.<name>.total_tokens`.
        is_begun: the run is a continued one, and keeps the settings that belong to its identity.
        is_logged: log what is chosen, or why nothing is.
    """
    if config.tuned != "auto" or is_open(config):
        return config
    named = given(config) if any(line_is_of(line, config) for line in lines()) else set()
    tokens = run_tokens(config, totals or {})
    found: list[tuple[float, Line, Config]] = []
    kept_out: set[str] = set()
    for line in applicable_lines(config):
        other = with_settings_of(config, line)
        if other is None:
            continue
        changed = {key for key in SPEED if value_of(other, key) != value_of(config, key)}
        if is_begun and changed.intersection(KEPT):
            continue
        if changed & named:
            kept_out |= changed & named
            continue
        speed = line.tokens_per_second * config.hw.num_devices
        found.append((1 / speed if tokens is None else line.compile_seconds + tokens / speed, line, other))
    if not found:
        if kept_out and is_logged:
            words = ", ".join(sorted(kept_out))
            log.info("conf/tuned.yaml has settings for model=%s hw=%s; this command sets %s itself, so they are "
                     "not used", config.model.name, config.hw.name, words)  # fmt: skip
        return with_saving(config, is_begun=is_begun, is_logged=is_logged)
    _, line, best = min(found, key=lambda each: each[0])
    if is_logged:
        log_settings(line, best)
    return replace(best, tuned="settled")


def log_settings(line: Line, config: Config) -> None:
    """Log which settings were chosen, and their planned figures."""
    log.info(
        "settings of conf/tuned.yaml: %s trainer.micro_batch_rows=%s, planned at %s tokens/s per chip and %.2f GiB "
        "(%s); tuned=off disables them",
        line.words, config.trainer.micro_batch_rows, f"{line.tokens_per_second:,.0f}", line.hbm_gib, line.date,
    )  # fmt: skip


def fields_of(config: Config) -> dict[str, Any] | None:
    """Return the entry of result.json for the line that a config has its settings from; None without one."""
    if config.tuned != "settled":
        return None
    for line in applicable_lines(config):
        other = with_settings_of(config, line)
        if other is not None and all(value_of(other, key) == value_of(config, key) for key in SPEED):
            kept = asdict(line)
            return {key: kept[key] for key in ("settings", "tokens_per_second", "hbm_gib", "libtpu", "date")}
    return None


def fastest(config: Config) -> Line | None:
    """Return the fastest line of a config's model and machine, whatever its rows are."""
    return max((line for line in lines() if line_is_of(line, config)), key=lambda x: x.tokens_per_second, default=None)


def tuned_notes(config: Config, speed: float) -> list[str]:
    """Return a plan's notes on the table: its settings are from it, or it is less than half as fast.

    In the second case a warning is logged as well.

    Args:
        speed: planned tokens per second of a chip.
    """
    found, best = fields_of(config), fastest(config)
    if found is not None:
        return [f"settings of conf/tuned.yaml ({found['date']}): {words_of(found['settings'])}"]
    if best is None or speed >= best.tokens_per_second / 2:
        return []
    log.warning(
        "%s tokens/s per chip are less than half of the %s that model=%s hw=%s is planned at with rows of %d tokens, "
        "%d at once: %s",
        f"{speed:,.0f}", f"{best.tokens_per_second:,.0f}", best.model, best.hw, best.row_tokens, best.micro_tokens,
        best.words,
    )  # fmt: skip
    return [
        f"less than half of the {best.tokens_per_second:,.0f} tokens/s per chip that conf/tuned.yaml has for "
        f"model={best.model} hw={best.hw}, with rows of {best.row_tokens:,} tokens: {best.words}"
    ]


def overrides_of(before: Config, after: Config) -> tuple[str, ...]:
    """Return the overrides that lead from one config to the other, as the command line takes them."""
    changed = [key for key in SPEED if value_of(before, key) != value_of(after, key)]
    return (*(override_of(key, value_of(after, key)) for key in changed), f"tuned={after.tuned}")


def words_of(settings: Mapping[str, Any]) -> str:
    """Return settings as the command line takes them."""
    return " ".join(override_of(key, value) for key, value in settings.items())


def line_is_of(line: Line, config: Config) -> bool:
    """Return whether a line is of a config's model and machine, by name."""
    return (line.model, line.hw) == (config.model.name, config.hw.name) and config.model.size == "full"


def applicable_lines(config: Config) -> Iterator[Line]:
    """Yield the lines that apply to a config."""
    mine, lora = [line for line in lines() if line_is_of(line, config)], config.lora
    if lora.dora or lora.target_parameters or lora.modules_to_save or lora.trainable_token_indices:
        return  # no line says whether its step has them, and they take memory
    if not mine:
        return
    try:
        facts = {facts_of(config)}
        if (other := config.objective.planned_as()) is not None:
            facts.add(facts_of(replace(config, objective=other)))
        longest = max(stage.geometry.seq_len for stage in resolve_stages(config))
    except ConfigError:
        return
    for line in mine:
        rank = max(ranks_of(lora), default=0)
        is_no_larger = 0 < rank <= line.rank and set(lora.targets) <= set(line.targets)
        if line.facts in facts and is_no_larger and longest <= min(line.row_tokens, line.micro_tokens):
            yield line


def facts_of(config: Config) -> str:
    """Return a digest of what a step depends on beside its speed settings, its rows and its adapter.

    Raises:
        ConfigError: the sizes of the model are not known.
    """
    arch = sizes_of(config.model)
    if arch is None:
        raise ConfigError(f"model.path={config.model.path}; its config.json cannot be read.")
    facts = {key: value for key, value in program_facts(config, arch).items() if not key.startswith(FREE)}
    facts["trainer"] = config.trainer._target_
    return digest_of(facts)


def with_settings_of(config: Config, line: Line) -> Config | None:
    """Return the config with the settings of a line; None where they are invalid for it.

    It has as many rows in a micro-batch as the line has tokens for.
    """
    values = {key: value for key, value in line.settings.items() if key != "sharding"}
    try:
        if "sharding" in line.settings and config.hw.parallel == "spmd":
            config = replace(config, sharding=sharding_table(line.settings["sharding"]))
        rows = int(config.trainer.global_batch_rows or 0) // num_shards(config)
        seq_len = int(config.trainer.seq_len)
        micro = fitting_rows(max(rows, 1), seq_len=seq_len, at_most=line.micro_tokens)
        config = with_values(config, {**values, MICRO: micro})
        stages = resolve_stages(config)
    except ConfigError:
        return None
    is_small = all(s.geometry.micro_rows * s.geometry.seq_len <= line.micro_tokens for s in stages)
    return config if is_small else None


def run_tokens(config: Config, totals: Mapping[str, int | None]) -> int | None:
    """Return the tokens of all steps of a run.

    None where the length of a source is not known; such a run is taken for a long one.
    """
    data = {name: replace(s, total_tokens=totals.get(name) or s.total_tokens) for name, s in config.data.items()}
    config = replace(config, data=data)
    tokens = 0
    for stage in resolve_stages(config):
        steps = stage.steps or assumed_steps(config, stage)
        if steps is None:
            return None
        tokens += steps * stage.geometry.global_rows * stage.geometry.seq_len
    return tokens


@cache
def lines(file: Path = TABLE) -> tuple[Line, ...]:
    """Return the lines of the table.

    Raises:
        ConfigError: one of them is not what a search writes.
    """
    if not file.exists():
        return ()
    found = yaml.safe_load(file.read_text(encoding="utf-8")) or []
    try:
        made = tuple(Line(**{**each, "targets": tuple(each["targets"])}) for each in found)
        problems = (setting_problem(key, value, taken=SET) for each in made for key, value in each.settings.items())
        for wrong in filter(None, problems):
            raise TypeError(wrong)
        return made
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{file}; a line of it is not what task=plan task.explore=search writes ({error}); restore the file, or "
            "set tuned=off."
        ) from error


def leaves_room(gib: float, *, hw: HwConfig) -> bool:
    """Return whether a step of so many GiB a chip leaves `BESIDE_GIB` of it."""
    return gib <= chip_limit_gib(hw) - BESIDE_GIB


def write_line(line: Line, *, file: Path) -> None:
    """Add a line to a table.

    It replaces one for the same step, rows, rank and way of stacking layers that is slower, or that another version of
    the compiler or of the machine's settings made.
    """

    def planned(each: Line) -> tuple[Any, ...]:
        stack = each.settings.get("model.stack")
        return each.model, each.hw, each.row_tokens, each.rank, each.targets, stack, each.step_tokens

    others = [each for each in lines(file) if planned(each) != planned(line)]
    rivals = [each for each in lines(file) if planned(each) == planned(line)]
    rivals = [each for each in rivals if (each.facts, each.libtpu) == (line.facts, line.libtpu)]
    fastest = max([line, *rivals], key=lambda each: each.tokens_per_second)
    every = sorted(
        [*others, fastest], key=lambda each: (each.model, each.hw, -each.row_tokens, -each.tokens_per_second)
    )
    shown = [{**asdict(each), "targets": list(each.targets), "settings": dict(each.settings)} for each in every]
    text = yaml.safe_dump(shown, sort_keys=False, default_flow_style=None, width=120)
    file.write_text(HEAD + text, encoding="utf-8")
    lines.cache_clear()


HEAD = """\
# The fastest settings of a step that the TPU's compiler planned, for each model and machine (README.md here, Tuned
# settings). Written by task=plan task.explore=search task.search.table=conf/tuned.yaml; nobody edits it. Planned, never
# run on a TPU.
"""
