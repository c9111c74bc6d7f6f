"""What a step saves of its layers, and how many rows a chip takes at once, by formulas.

For runs that have no line in conf/tuned.yaml. Where memory allows it, `model.remat=save_dots` was the fastest of all
policies in every search of a decoder with attention, 1.16 to 1.37 times `layer_inputs` (tests/benchmarks/LOG.md, What a
step saves where no line applies).
"""

import logging
from dataclasses import replace

from tpu_experiments.config.commands import override_of
from tpu_experiments.config.curriculum import resolve_stages
from tpu_experiments.config.defaults import LANES, fitting_rows, rows_of
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.mesh import num_shards
from tpu_experiments.config.messages import is_own
from tpu_experiments.config.model_schema import ModelConfig
from tpu_experiments.config.schema import Config, TrainerConfig
from tpu_experiments.config.tuned import given, value_of, with_values
from tpu_experiments.metrics.flops import read_decoder, recomputes
from tpu_experiments.planning.analytic import largest_stage
from tpu_experiments.planning.plan import ChipMemory
from tpu_experiments.planning.stored_plans import sizes_of

log = logging.getLogger(__name__)
REMAT, MICRO = "model.remat", "trainer.micro_batch_rows"
FASTEST = "save_dots"
FEWEST_TOKENS = 2048
"""Fewest tokens of a micro-batch to which `FASTEST` may reduce it: with fewer, a chip's share of sharded weights is
gathered more often than products take time for."""
MARGIN = 1.05
"""Factor of the formulas' memory, for safety: of the 47 lines of conf/tuned.yaml with `FASTEST` they give 1.03 to
1.87 times the compiler's."""
BESIDE_GIB = 0.25
"""GiB of a chip that are left free: beside a step lies the code of a run's other programs, of which each has 0.02 to
0.1 GiB."""


def with_saving(config: Config, *, is_begun: bool, is_logged: bool) -> Config:
    """Return the config with `save_dots` and as many rows at once as are estimated to fit with it.

    Where none do, with the layers' inputs and as many rows as fit with them. Of a policy that the command or its files
    set the rows alone are chosen, and not even those where they are set too. Unchanged where nothing fits, and where
    the formulas do not hold: without a TPU's memory, with layers that are not folded or have more than attention, with
    a base in NF4, with another class of model or trainer, and with objectives whose step needs more than one of next
    tokens. Of these a model in the place of the preset's own does not save what that does.

    Args:
        is_begun: the run is a continued one, and keeps what it saves.
        is_logged: log what is chosen.
    """
    named = given(config)
    is_open = REMAT not in named and not is_begun and not config.model.saved
    if not is_estimated(config):
        return with_inputs_of_another(config, is_logged=is_logged) if is_open else config
    policies = [config.model.remat]
    if is_open:
        policies = [FASTEST, config.model.remat if config.model.remat != FASTEST else ModelConfig.remat]
    elif config.model.remat == FASTEST:  # with the rows that it had been chosen with
        policies = [FASTEST, FASTEST]
    for number, remat in enumerate(policies, start=1):
        kept, is_last = with_values(config, {REMAT: remat}), number == len(policies)
        found = largest_fitting(kept, keeps_rows=MICRO in named, is_last=is_last)
        if found is not None:
            break
    if found is None:
        return with_inputs_of_another(config, is_logged=is_logged) if is_open else config
    if found[0] == config:
        return config
    chosen, memory = found
    if is_logged:
        changed = [key for key in (REMAT, MICRO) if value_of(chosen, key) != value_of(config, key)]
        log.info(
            "%s: formulas put the largest step at %.1f of %.2f GiB; tuned=off leaves %s",
            " ".join(override_of(key, value_of(chosen, key)) for key in changed), memory.total, memory.limit,
            " ".join(override_of(key, value_of(config, key)) for key in changed),
        )  # fmt: skip
    return replace(chosen, tuned="settled")


def with_inputs_of_another(config: Config, *, is_logged: bool) -> Config:
    """Return the config with the layers' inputs alone saved, where a TPU trains another model than the preset's own.

    What a preset saves fits its own sizes.
    """
    if is_own(config.model) or config.hw.topology is None or config.model.remat != FASTEST:
        return config
    if is_logged:
        log.info(
            "%s=%s: the %s of model=%s is for its own sizes, not those of %s; tuned=off leaves it",
            REMAT, ModelConfig.remat, FASTEST, config.model.name, config.model.path,
        )  # fmt: skip
    return replace(with_values(config, {REMAT: ModelConfig.remat}), tuned="settled")


def is_estimated(config: Config) -> bool:
    """Return whether the formulas hold for a run's step, and its layers are recomputed at all."""
    objective = config.objective.planned_as() or config.objective
    is_plain = config.model._target_ == ModelConfig._target_ and config.trainer._target_ == TrainerConfig._target_
    counts = not objective.counts_flops and not objective.teacher_entries()
    is_plain &= config.model.linear == "plain" and config.model.base != "nf4"  # its temporaries are 10.1 GiB, not 5.8
    if config.hw.topology is None or config.model.size == "tiny" or not (is_plain and counts and recomputes(config)):
        return False
    arch = sizes_of(config.model)
    try:
        decoder = None if arch is None else read_decoder(arch)
    except ConfigError:  # a family whose sizes no formula knows
        return False
    return decoder is not None and decoder.has_equal_layers(config.lora) and not decoder.rule(LANES)


def largest_fitting(config: Config, *, keeps_rows: bool, is_last: bool) -> tuple[Config, ChipMemory] | None:
    """Return the config with the most rows at once that fit, and its memory; None where none do.

    Args:
        keeps_rows: only the configured rows are tried.
        is_last: nothing else is left to try, so that memory needs no margin, and rows no fewest tokens.
    """
    arch = sizes_of(config.model)
    for rows in [None] if keeps_rows else rows_to_try(config, least=1 if is_last else FEWEST_TOKENS):
        try:
            chosen = config if rows is None else with_values(config, {MICRO: rows})
            _, memory = largest_stage(chosen, arch, resolve_stages(chosen))
        except ConfigError:  # rows that a stage of another length cannot be divided into
            continue
        needed = memory.total if is_last else MARGIN * memory.total + BESIDE_GIB
        if needed <= memory.limit:
            return chosen, memory
    return None


def rows_to_try(config: Config, *, least: int) -> list[int | None]:
    """Return the rows of a chip at once to try, the most first: None as configured, then fewer.

    The latter divide the chip's rows and have at least so many tokens.
    """
    rows, seq_len = rows_of(config).global_rows // num_shards(config), rows_of(config).seq_len
    most = fitting_rows(rows, seq_len=seq_len, at_most=config.model.micro_tokens)
    fewer = [n for n in range(most - 1, 0, -1) if rows % n == 0 and n * seq_len >= least]
    return [None, *fewer]
