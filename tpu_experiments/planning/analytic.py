"""Estimates by formulas: FLOPs, memory, and a whole plan where no TPU compiler is available."""

from collections.abc import Callable, Sequence
from typing import Any

from tpu_experiments.config.curriculum import Geometry, Stage
from tpu_experiments.config.mesh import mesh_of
from tpu_experiments.config.schema import OUTSIDE_BYTES, STATE_BYTES, Config
from tpu_experiments.metrics.flops import FlopsPerToken, decoder_flops, read_decoder, recomputes, saved_names, trainable
from tpu_experiments.planning.compare import SHARE_OF_PEAK
from tpu_experiments.planning.plan import ChipMemory, Plan, Program, Shortage, analytic_chip_memory, plan_of
from tpu_experiments.planning.roofline import roofline_time
from tpu_experiments.planning.timing import Calibration, StepTime, datasheet_time
from tpu_experiments.planning.work import StepSettings, analytic_memory

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def step_settings(config: Config, geometry: Geometry) -> StepSettings:
    """Return the settings that the memory of a step depends on."""
    mesh = mesh_of(config.hw, config.sharding)
    return StepSettings(
        seq_len=geometry.seq_len,
        micro_rows=geometry.micro_rows,
        trainable=trainable(config),
        accumulation=geometry.accumulation,
        lora=config.lora,
        state_bytes=STATE_BYTES.get(config.optim._target_) or own_state_bytes(config),
        outside_bytes=OUTSIDE_BYTES.get(config.optim._target_),
        averaged=config.optim.is_averaged,
        recompute=recomputes(config),
        saved=saved_names(config),
        in_loop=config.hw.runtime == "xla",
        loss_chunk_tokens=config.trainer.loss_chunk_tokens,
        attention="sdpa" if config.model.attention in ("sdpa", "eager") else "flash",
        sharding="fsdp" if config.hw.parallel == "spmd" and config.sharding.name != "replicated" else "replicated",
        chips=mesh.fsdp * mesh.tensor,
        weight_bytes=ITEM_BYTES[config.model.dtype],
        base=config.model.base,
        double_quant=config.model.base_double_quant,
        group=config.model.linear_group if config.model.linear == "lr_qat" and config.lora.r else None,
    )


def own_state_bytes(config: Config) -> Callable[[tuple[int, ...]], float]:
    """Return the bytes of the state of one parameter by its shape, as an optimizer of the user's own makes it.

    Only for such a one is torch loaded here.

    Raises:
        ConfigError: the class cannot be imported, or does not accept its settings.
    """
    from tpu_experiments.optim.updates import state_bytes_of

    return state_bytes_of(config)


def flops_of(config: Config, arch: Any, *, seq_len: int) -> FlopsPerToken:
    """Return the FLOPs per token of the configured training; torch is loaded only where the objective counts them."""
    if not config.objective.counts_flops:
        return decoder_flops(config, arch, seq_len=seq_len)
    from tpu_experiments.objectives.base import trained_flops

    return trained_flops(config, arch, seq_len=seq_len)


def estimated_memory(config: Config, arch: Any, *, geometry: Geometry) -> ChipMemory:
    """Estimate the GiB of one chip by formulas."""
    return analytic_chip_memory(analytic_memory(arch, step=step_settings(config, geometry)), hw=config.hw)


def largest_stage(config: Config, arch: Any, stages: Sequence[Stage]) -> tuple[Stage, ChipMemory]:
    """Return the stage that needs the most memory, and its estimate."""
    needs = [(stage, estimated_memory(config, arch, geometry=stage.geometry)) for stage in stages]
    return max(needs, key=lambda need: need[1].total)


def estimated_time(config: Config, arch: Any, *, geometry: Geometry) -> StepTime:
    """Estimate the seconds of one step: on a TPU by a roofline, else at an assumed share of the chip's peak."""
    hw, flops = config.hw, flops_of(config, arch, seq_len=geometry.seq_len)
    assert hw.chip is not None
    tokens = geometry.global_rows * geometry.seq_len / hw.num_devices
    if hw.topology is not None:
        return roofline_time(flops, arch, step=step_settings(config, geometry), tokens=tokens, hw=hw)
    return datasheet_time(flops, tokens=tokens, chip=hw.chip, share_of_peak=SHARE_OF_PEAK, method="analytic")


def analytic_plan(config: Config, arch: Any, stages: Sequence[Stage], *, reason: str) -> Plan:
    """Plan memory and time of the largest stage by formulas, without the length of the run.

    Args:
        reason: why nothing was compiled, for the notes.
    """
    stage, memory = largest_stage(config, arch, stages)
    geometry, fits = stage.geometry, memory.headroom >= 0
    message = f"formulas put the step at {memory.total:.2f} GiB of {memory.limit:.2f} GiB"
    shortage = None if fits else Shortage(message, memory.total, memory.limit)
    return plan_of(
        config,
        arch,
        stages,
        geometry=geometry,
        fits=fits,
        memory=memory,
        flops=flops_of(config, arch, seq_len=geometry.seq_len),
        calibration=Calibration(),
        method="analytic",
        shortage=shortage,
        programs=tuple(training_programs(stages)),
        time=estimated_time(config, arch, geometry=geometry) if fits else None,
        notes=(
            f"nothing was compiled ({reason}): memory is from formulas, which were between 10 % below and 90 % above "
            "the compiler's total where both are known",
            how_timed(config, arch),
        ),
    )


def how_timed(config: Config, arch: Any) -> str:
    """Return how formulas came to the seconds of a step, for a plan's notes."""
    if config.hw.topology is None:
        return f"a step is its FLOPs at an assumed {100 * SHARE_OF_PEAK:.0f} % of peak; no network, no bandwidth"
    found = "a step's seconds are of a roofline: compiled ones take 0.8 to 1.5 times as long where both are known"
    if read_decoder(arch).stacked:
        found += "; sorting tokens by expert is not counted, and took half of the one compiled mixture's step"
    if mesh_of(config.hw, config.sharding).tensor > 1:
        found += "; nor are sums of activations over chips that share a row"
    return found


def training_programs(stages: Sequence[Stage]) -> list[Program]:
    """List one program for each batch shape, without compiling it."""
    users: dict[str, list[str]] = {}
    for stage in stages:
        g = stage.geometry
        users.setdefault(f"{g.accumulation} x {g.micro_rows} x {g.seq_len}", []).append(stage.name)
    return [Program("train", tuple(names), shape, None) for shape, names in users.items()]
