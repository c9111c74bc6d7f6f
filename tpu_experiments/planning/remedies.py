"""Settings that would make a step fit, by formulas corrected by the compiler's report."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tpu_experiments.config.curriculum import Geometry
from tpu_experiments.config.help import choices
from tpu_experiments.config.schema import Config, TrainerConfig
from tpu_experiments.config.sources import MeshConfig
from tpu_experiments.config.variants import machine
from tpu_experiments.planning.analytic import estimated_memory
from tpu_experiments.planning.plan import ChipMemory, chip_limit_gib


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
        f"no trainer.micro_batch_rows, sharding or half of trainer.seq_len fits on hw={config.hw.name}: the least of "
        f"them is estimated to take {min(totals):.2f} of {memory.limit:.2f} GiB per chip"
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

    These are a loss in chunks, fewer rows at a time, sharded weights, and shorter rows.
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
        micro = "" if cut is geometry else f" trainer.micro_batch_rows={cut.micro_rows}"
        yield f"sharding=fsdp{micro}", split, cut
    least = cuts[-1] if cuts else geometry
    if geometry.seq_len >= 16:
        shorter = replace(least, seq_len=geometry.seq_len // 2)
        yield f"trainer.seq_len={shorter.seq_len} trainer.micro_batch_rows={least.micro_rows}", config, shorter


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
