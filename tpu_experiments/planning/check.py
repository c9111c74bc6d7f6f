"""What is known of a run's memory before it starts: by a plan of the same programs, else by formulas that are exact.

Reads files and the config alone, so that it comes before anything that takes seconds to load or touches a device.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any, Literal

from tpu_experiments.config.curriculum import Geometry
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.rows import is_open
from tpu_experiments.config.schema import AdafactorConfig, AdamWConfig, Config, TrainerConfig
from tpu_experiments.config.sources import ModelConfig
from tpu_experiments.planning.analytic import ITEM_BYTES, largest_stage, step_settings
from tpu_experiments.planning.plan import chip_limit_gib
from tpu_experiments.planning.remedies import remedies_for
from tpu_experiments.planning.saved import SavedPlan, known_plan, sizes_of
from tpu_experiments.planning.work import MemoryEstimate, analytic_memory

log = logging.getLogger(__name__)
STOCK_MODEL, STOCK_TRAINER = ModelConfig._target_, TrainerConfig._target_
STOCK_OPTIMIZERS = (AdamWConfig._target_, AdafactorConfig._target_)


@dataclass(frozen=True)
class Finding:
    """What speaks against starting."""

    words: str
    certainty: Literal["known", "estimated"]
    """`known`: the compiler said so, or what stays on the chip alone is too much. `estimated`: by formulas."""


def check_memory(config: Config) -> None:
    """Refuse a run that is known not to fit into its chips, warn of one that is estimated not to.

    Raises:
        ConfigError: it is known, and `trainer.plan_check` is `refuse`.
    """
    if config.trainer.plan_check == "off" or config.hw.chip is None or config.hw.topology is None:
        return
    found = finding(config)
    if found is None:
        return
    if found.certainty == "known" and config.trainer.plan_check == "refuse":
        raise ConfigError(f"{found.words}; or start all the same with trainer.plan_check=warn.")
    log.warning("%s.", found.words)


def finding(config: Config) -> Finding | None:
    """What is known; None where the run fits, or where the model's sizes are not known.

    Of a run whose rows are left to its data nothing is known but what stays on the chip at any length of a row.
    """
    arch = sizes_of(config.model)
    if arch is None or config.model._target_ != STOCK_MODEL:
        return None
    try:
        if is_open(config):
            found = by_formulas(config, arch)
            return found if found is not None and found.certainty == "known" else None
        known = known_plan(config, arch)
        if known is not None:
            return None if known.fields["fits"] else Finding(planned_words(config, known), "known")
        return by_formulas(config, arch)
    except ConfigError as error:
        log.info("nothing is known of the run's memory: %s", error)
        return None


def planned_words(config: Config, plan: SavedPlan) -> str:
    """Why it does not fit, by a compiled plan."""
    fields = plan.fields
    memory, shortage = fields["hbm_gib_per_chip"], fields["does_not_fit"] or {}
    used, limit = shortage.get("used_gib", memory["total"]), shortage.get("limit_gib", memory["limit"])
    libtpu = fields["versions"].get("libtpu", "an unknown version")
    return (
        f"hw={config.hw.name}; the program {memory['program']} of this run was compiled for {fields['topology']} and "
        f"takes {used:.2f} of {limit:.2f} GiB per chip ({plan.file}, libtpu {libtpu}); "
        f"{nearest_words(shortage.get('remedies', []))}"
    )


def nearest_words(remedies: Any) -> str:
    """The settings of a plan's remedies as advice."""
    if not remedies:
        return "task=plan task.explore=search looks for settings that fit"
    first, *others = remedies
    if first.startswith("no "):  # a sentence, and then machines that hold it
        return "; use ".join([first, *others])
    return f"nearest settings that fit: {', or '.join(remedies)}"


def by_formulas(config: Config, arch: Any) -> Finding | None:
    """What formulas say: exact for what stays on the chip, up to 45 % wrong for what a step needs beside it."""
    stage, memory = largest_stage(config, arch)
    estimate = analytic_memory(arch, step=step_settings(config, stage.geometry))
    estimate = estimate if is_stock(config) else replace(estimate, optimizer=0.0)
    geometry = replace(stage.geometry, accumulation=1) if is_open(config) else stage.geometry
    certain, limit = certain_gib(config, estimate, geometry=geometry), chip_limit_gib(config.hw)
    chip = f"the {limit:.2f} GiB that one program may take of a chip"
    if certain > limit:
        parts = {
            "base weights": estimate.base,
            "adapters" if estimate.base else "trained weights": estimate.adapters,
            "optimizer state": estimate.optimizer,
            "gradients": certain - estimate.arguments,
        }
        listed = ", ".join(f"{name} {gib:.2f}" for name, gib in parts.items() if gib > 0)
        remedies = remedies_for(config, arch, memory=memory, geometry=stage.geometry)
        words = f"hw={config.hw.name}; {listed} are {certain:.2f} GiB per chip before any activation, more than {chip}"
        return Finding(f"{words}; {nearest_words(remedies)}", "known")
    if memory.total <= limit:
        return None
    return Finding(
        f"hw={config.hw.name}; formulas put the step at {memory.total:.2f} GiB per chip, more than {chip}; they are "
        "up to 45 % wrong in what is not weights, and task=plan compiles it and knows",
        "estimated",
    )


def is_stock(config: Config) -> bool:
    """Whether the optimizer is one whose state the formulas count."""
    return config.trainer._target_ == STOCK_TRAINER and config.optim._target_ in STOCK_OPTIMIZERS


def certain_gib(config: Config, estimate: MemoryEstimate, *, geometry: Geometry) -> float:
    """What the formulas state exactly: the arguments, and gradients where all must exist at once.

    They are summed in float32 over micro-batches; to be clipped together they need the model's data type at least.
    """
    gradients = 0.0
    if geometry.accumulation > 1:
        gradients = estimate.adapters
    elif config.optim.clip_norm is not None:
        gradients = estimate.adapters * ITEM_BYTES[config.model.dtype] / 4
    return estimate.arguments + gradients
