"""What is known of a run's memory before it starts, and settings with which a step that does not fit would.

By a plan of the same programs, else by formulas that are exact. Reads files and the config alone, so that it comes
before anything that takes seconds to load or touches a device."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tpu_experiments.config.compose import machine
from tpu_experiments.config.curriculum import Geometry, Stage, resolve_stages
from tpu_experiments.config.defaults import is_open
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.messages import choices
from tpu_experiments.config.model_schema import MeshConfig, ModelConfig
from tpu_experiments.config.schema import Config, TrainerConfig
from tpu_experiments.metrics.flops import recomputes, saved_names
from tpu_experiments.planning.analytic import ITEM_BYTES, estimated_memory, largest_stage, step_settings
from tpu_experiments.planning.plan import ChipMemory, chip_limit_gib
from tpu_experiments.planning.stored_plans import SavedPlan, known_plan, sizes_of
from tpu_experiments.planning.work import MemoryEstimate, analytic_memory


def remedies_for(config: Config, arch: Any, *, memory: ChipMemory, geometry: Geometry) -> tuple[str, ...]:
    """Return the nearest settings that are estimated to fit, the mildest first.

    Where none does on this machine, a sentence that says so and then the smallest machine that is large enough.
    """
    scale = correction(config, arch, memory=memory, geometry=geometry)
    found: dict[str, str] = {}
    totals = [memory.total]
    for words, changed, cut in nearest(config, geometry):
        estimate = estimated_memory(changed, arch, geometry=cut)
        totals.append(estimate.arguments + scale * estimate.temporaries)
        if totals[-1] <= estimate.limit:
            found.setdefault(words.partition("=")[0], f"{words} (estimated {totals[-1]:.2f} GiB per chip)")
    if found:
        return tuple(found.values())
    none = (
        "no trainer.micro_batch_rows, sharding, model.remat or half of trainer.seq_len fits on "
        f"hw={config.hw.name}: the least of them is estimated to take {min(totals):.2f} of {memory.limit:.2f} GiB per "
        "chip"
    )
    return (none, *larger_machines(config, arch, geometry=geometry, scale=scale))


def correction(config: Config, arch: Any, *, memory: ChipMemory, geometry: Geometry) -> float:
    """Return the factor from the formulas' temporaries to the compiler's; 1 where it did not count them."""
    estimate = estimated_memory(config, arch, geometry=geometry)
    if memory.source == "analytic" or memory.temporaries <= 0 or estimate.temporaries <= 0:
        return 1.0
    return memory.temporaries / estimate.temporaries


def nearest(config: Config, geometry: Geometry) -> Iterator[tuple[str, Config, Geometry]]:
    """Yield overrides with the config and the batch that they lead to, the mildest first.

    These are a loss in chunks, fewer rows at a time, sharded weights, layers of which the inputs alone are saved,
    shorter rows, and a base in int8, on a GPU in NF4.
    """
    per_device = geometry.micro_rows * geometry.accumulation
    smaller = [n for n in range(geometry.micro_rows - 1, 0, -1) if per_device % n == 0]
    cuts = [replace(geometry, micro_rows=n, accumulation=per_device // n) for n in smaller]
    split = replace(config, sharding=replace(config.sharding, name="fsdp", mesh=MeshConfig()))
    can_split = config.hw.parallel == "spmd" and config.sharding.name == "replicated"
    if config.trainer.loss_chunk_tokens is None:
        tokens = TrainerConfig.loss_chunk_tokens
        chunked = replace(config, trainer=replace(config.trainer, loss_chunk_tokens=tokens))
        yield f"trainer.loss_chunk_tokens={tokens}", chunked, geometry
    for cut in cuts:
        yield f"trainer.micro_batch_rows={cut.micro_rows}", config, cut
    for cut in [geometry, *cuts] if can_split else []:
        yield f"sharding=fsdp{rows_text(cut, geometry)}", split, cut
    if recomputes(config) and saved_names(config):
        lighter = replace(config, model=replace(config.model, remat=ModelConfig.remat, saved=[]))
        saved = " model.saved=[]" if config.model.saved else ""
        for cut in [geometry, *cuts]:
            yield f"model.remat={ModelConfig.remat}{saved}{rows_text(cut, geometry)}", lighter, cut
    least = cuts[-1] if cuts else geometry
    if geometry.seq_len >= 16:
        shorter = replace(least, seq_len=geometry.seq_len // 2)
        yield f"trainer.seq_len={shorter.seq_len} trainer.micro_batch_rows={least.micro_rows}", config, shorter
    if config.model.base == "dense" and config.lora.r and config.model.linear == "plain":
        base = "nf4" if config.hw.device == "cuda" else "int8"
        quantised = replace(config, model=replace(config.model, base=base))
        for cut in [geometry, *cuts]:
            yield f"model.base={base}{rows_text(cut, geometry)}", quantised, cut


def rows_text(cut: Geometry, geometry: Geometry) -> str:
    """Return the override for fewer rows at a time, after a blank; empty where they are as many."""
    return "" if cut is geometry else f" trainer.micro_batch_rows={cut.micro_rows}"


def larger_machines(config: Config, arch: Any, *, geometry: Geometry, scale: float) -> list[str]:
    """Return the smallest machine of conf/hw that is estimated to hold one row per chip, as a sentence.

    Weights are sharded where the machine can; another sentence says where no machine suffices.
    """
    fits = []
    for name in choices("hw"):
        hw = machine(name)
        if hw.topology is None or geometry.global_rows % hw.num_devices:
            continue
        there = replace(config, hw=hw, sharding=replace(config.sharding, name="fsdp", mesh=MeshConfig()))
        cut = replace(geometry, micro_rows=1, num_shards=hw.num_devices)
        estimate = estimated_memory(there, arch, geometry=cut)
        if estimate.arguments + scale * estimate.temporaries <= estimate.limit:
            fits.append((hw.num_devices * chip_limit_gib(hw), name))
    if not fits:
        return ["no machine of conf/hw holds it with one row per chip: a smaller model or shorter rows"]
    return [
        f"hw={min(fits)[1]} trainer.micro_batch_rows=1, the smallest machine of conf/hw that is estimated to hold it"
    ]


log = logging.getLogger(__name__)
STOCK_MODEL, STOCK_TRAINER = ModelConfig._target_, TrainerConfig._target_


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
    hw = config.hw
    if config.trainer.plan_check == "off" or hw.chip is None or (hw.topology is None and hw.device != "cuda"):
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
        stages = resolve_stages(config)
        if is_open(config):
            found = formula_finding(config, arch, stages)
            return found if found is not None and found.certainty == "known" else None
        known = None if config.hw.topology is None else known_plan(config, arch, stages)
        if known is not None:
            return None if known.fields["fits"] else Finding(plan_finding_text(config, known), "known")
        return formula_finding(config, arch, stages)
    except ConfigError as error:
        log.info("the run's memory was not checked: %s", error)
        return None


def plan_finding_text(config: Config, plan: SavedPlan) -> str:
    """Return why a run does not fit, by a compiled plan."""
    fields = plan.fields
    memory, shortage = fields["hbm_gib_per_chip"], fields["does_not_fit"] or {}
    used, limit = shortage.get("used_gib", memory["total"]), shortage.get("limit_gib", memory["limit"])
    libtpu = fields["versions"].get("libtpu", "an unknown version")
    return (
        f"hw={config.hw.name}; the program {memory['program']} of this run was compiled for {fields['topology']} and "
        f"takes {used:.2f} of {limit:.2f} GiB per chip ({plan.file}, libtpu {libtpu}); "
        f"{remedies_text(shortage.get('remedies', []))}"
    )


def remedies_text(remedies: Any) -> str:
    """Format the settings of a plan's remedies as advice."""
    if not remedies:
        return "task=plan task.explore=search looks for settings that fit"
    first, *others = remedies
    if first.startswith("no "):  # a sentence, followed by machines that are large enough
        return "; use ".join([first, *others])
    return f"nearest settings that fit: {', or '.join(remedies)}"


def formula_finding(config: Config, arch: Any, stages: Sequence[Stage]) -> Finding | None:
    """Check memory by formulas.

    They are exact for what is resident on the chip, and up to 45 % wrong for what a step needs beside it.
    """
    stage, memory = largest_stage(config, arch, stages)
    estimate = analytic_memory(arch, step=step_settings(config, stage.geometry))
    if config.trainer._target_ != STOCK_TRAINER:  # it may train with another optimizer
        estimate = replace(estimate, optimizer=0.0)
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
        return Finding(f"{words}; {remedies_text(remedies)}", "known")
    if memory.total <= limit:
        return None
    compiled = ", and task=plan compiles it and knows" if config.hw.topology else ""
    return Finding(
        f"hw={config.hw.name}; formulas put the step at {memory.total:.2f} GiB per chip, more than {chip}; they are "
        f"up to 45 % wrong in what is not weights{compiled}",
        "estimated",
    )


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
