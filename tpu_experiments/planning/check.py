"""Memory check before a run starts: by a plan of the same programs, otherwise by formulas.

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
    """A reason not to start a run."""

    words: str
    certainty: Literal["known", "estimated"]
    """`known`: by the compiler, or since what is resident on the chip is too much by itself. `estimated`: by formulas.
    """


def check_memory(config: Config) -> None:
    """Refuse a run that is known not to fit into its chips, warn of one that is estimated not to.

    Raises:
        ConfigError: the run is known not to fit, and `trainer.plan_check` is `refuse`.
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
    """Return why the run does not fit; None where it does, or where the model's sizes are not known.

    Where the data determines the length of rows, only what is resident on the chip at any length is known.
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
    """Return why a run does not fit, by a compiled plan."""
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
    """Format the settings of a plan's remedies as advice."""
    if not remedies:
        return "task=plan task.explore=search looks for settings that fit"
    first, *others = remedies
    if first.startswith("no "):  # a sentence, followed by machines that are large enough
        return "; use ".join([first, *others])
    return f"nearest settings that fit: {', or '.join(remedies)}"


def by_formulas(config: Config, arch: Any) -> Finding | None:
    """Check memory by formulas.

    They are exact for what is resident on the chip, and up to 45 % wrong for what a step needs beside it.
    """
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
    """Return whether trainer and optimizer are stock ones, whose state the formulas count."""
    return config.trainer._target_ == STOCK_TRAINER and config.optim._target_ in STOCK_OPTIMIZERS


def certain_gib(config: Config, estimate: MemoryEstimate, *, geometry: Geometry) -> float:
    """Return the GiB that formulas state exactly: arguments, and gradients where all exist at once.

    Gradients are summed in float32 over micro-batches; to be clipped together they need the model's data type at least.
    """
    gradients = 0.0
    if geometry.accumulation > 1:
        gradients = estimate.adapters
    elif config.optim.clip_norm is not None:
        gradients = estimate.adapters * ITEM_BYTES[config.model.dtype] / 4
    return estimate.arguments + gradients
