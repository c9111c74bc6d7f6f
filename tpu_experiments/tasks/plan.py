"""task=plan: compile the trainer's own programs for the configured TPU, on a machine without one."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tpu_experiments.config.build import locate
from tpu_experiments.config.curriculum import Stage, resolve_stages
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.data.prepared import NotPrepared
from tpu_experiments.io import paths, strict_json
from tpu_experiments.logging.runlog import start_run_log, stop_run_log
from tpu_experiments.metrics.stopwatch import Stopwatch
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.shapes import ShapesOfModel
from tpu_experiments.planning.assemble import chip_memory, shortage_of, step_work
from tpu_experiments.planning.chart import plan_chart_svg
from tpu_experiments.planning.compiled import Compiled, compile_program
from tpu_experiments.planning.hlo import read_program
from tpu_experiments.planning.length import run_length
from tpu_experiments.planning.money import RunLength, cost_of
from tpu_experiments.planning.page import plan_markdown
from tpu_experiments.planning.plan import ChipMemory, Plan, Program
from tpu_experiments.planning.report import plan_json, plan_table
from tpu_experiments.planning.timing import StepTime, StepWork, calibration_of, step_time
from tpu_experiments.planning.trace import Lowered, TracingRuntime
from tpu_experiments.planning.work import FlopsPerToken, flops_of_token
from tpu_experiments.training.inputs import RunInputs, shuffled_rows, stage_steps
from tpu_experiments.training.sources import prepare_sources, tokenizer_for
from tpu_experiments.training.step import ROW_TENSORS

log = logging.getLogger(__name__)
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Planned:
    """One program, traced, compiled and read."""

    lowered: Lowered
    compiled: Compiled
    memory: ChipMemory
    cycles_by_class: dict[str, int]
    work: StepWork | None
    time: StepTime | None


def run(config: Config) -> None:
    """Print the plan and write plan.json, plan.md and plan.svg to `<output_dir>/plans/<name>`.

    Raises:
        ConfigError: the hardware has no TPU topology, or the compiler could not be run.
    """
    check_hw(config)
    start_run_log(None, rank=0)
    try:
        plan = make_plan(config)
    finally:
        stop_run_log()
    folder = paths.join(config.output_dir, "plans", str(config.name))
    paths.make_dirs(folder)
    paths.write_text_atomic(paths.join(folder, "plan.svg"), plan_chart_svg(plan))
    paths.write_text_atomic(paths.join(folder, "plan.md"), plan_markdown(plan, chart="plan.svg"))
    paths.write_text_atomic(paths.join(folder, "plan.json"), strict_json.dumps(plan_json(plan), indent=1) + "\n")
    print(plan_table(plan))
    print(f"plan: {folder}/plan.md")


def check_hw(config: Config) -> None:
    """Refuse hardware that no TPU compiler knows.

    Raises:
        ConfigError: it has no topology.
    """
    if config.hw.topology is None or config.hw.runtime != "xla":
        raise ConfigError(
            f"hw={config.hw.name}; task=plan compiles for a TPU and this hardware names no topology; choose one that "
            "does, for example hw=v5e8, hw=v6e8 or hw=colab."
        )


def make_plan(config: Config) -> Plan:
    """Trace, compile and read every training program; the plan is that of the one that takes most memory."""
    runtime = TracingRuntime(config.hw, sharding=config.sharding)
    trainer = planned_trainer(config, runtime)
    trainer.build()
    arch = trainer.model.source.config
    planned: dict[Shape, Planned] = {}
    shapes = list(dict.fromkeys(shape_of(stage, runtime=runtime) for stage in trainer.inputs.stages))
    for shape in tqdm(shapes, desc="compiling", unit=" programs", leave=False, disable=None):
        flops = flops_per_token(config, arch, seq_len=shape[2])
        planned[shape] = plan_program(config, trainer, shape=shape, flops=flops)
    return assembled(config, trainer, planned)


def assembled(config: Config, trainer: Any, planned: Mapping[Shape, Planned]) -> Plan:
    """Everything that is known of the run, from its programs."""
    hw, runtime = config.hw, trainer.runtime
    stages: list[Stage] = trainer.inputs.stages
    largest = max(planned, key=lambda shape: planned[shape].memory.total)
    chosen = planned[largest]
    geometry = next(s.geometry for s in stages if shape_of(s, runtime=runtime) == largest)
    micro, seq_len = geometry.micro_rows, geometry.seq_len
    arch = trainer.model.source.config
    remedies = remedies_for(config, micro=micro, seq_len=seq_len)
    shortage = shortage_of(chosen.compiled, chosen.memory, arch=arch, rows=micro, seq_len=seq_len, remedies=remedies)
    calibration = calibration_of(hw)
    times = {stage.name: planned[shape_of(stage, runtime=runtime)].time for stage in stages}
    length, notes = length_of(config, stages, times=times, memory=chosen.memory)
    return Plan(
        name=str(config.name),
        model=config.model.name,
        data=tuple(config.data),
        hw=hw,
        sharding=config.sharding.name if hw.parallel == "spmd" else "replicated",
        global_batch=geometry.global_rows,
        micro_batch=micro,
        seq_len=seq_len,
        fits=shortage is None,
        memory=chosen.memory,
        flops=flops_per_token(config, arch, seq_len=seq_len),
        calibration=calibration,
        shortage=shortage,
        programs=tuple(described(planned, stages, runtime=runtime)),
        work=chosen.work,
        cycles_by_class=chosen.cycles_by_class,
        time=None if shortage else chosen.time,
        run=None if shortage else length,
        cost=cost_of(length, price=hw.price, num_devices=hw.num_devices, calibration=calibration)
        if length and not shortage
        else None,
        versions=chosen.compiled.versions,
        notes=tuple(notes),
    )


def length_of(
    config: Config, stages: list[Stage], *, times: Mapping[str, StepTime | None], memory: ChipMemory
) -> tuple[RunLength | None, list[str]]:
    """The whole run in seconds, where it is known, and what was assumed or is missing."""
    steps, unknown = steps_of(config, stages)
    base_gib = memory.classes.get("base weights", 0.0)
    length, notes = run_length(config, stages, steps=steps, times=times, base_gib=base_gib)
    return length, [*unknown, *notes]


def steps_of(config: Config, stages: list[Stage]) -> tuple[dict[str, int | None], list[str]]:
    """Optimizer steps of every stage, and why some are not known: an epoch is as long as the prepared data."""
    limit = config.trainer.max_stage_steps
    steps = {stage.name: stage.steps and min(stage.steps, limit or stage.steps) for stage in stages}
    if None not in steps.values():
        return steps, []
    try:
        tokenizer = tokenizer_for(config)
        sources = prepare_sources(config, tokenizer=tokenizer, stages=stages, is_lookup=True)
    except NotPrepared as error:
        return steps, [f"hours and dollars need the length of an epoch: data.{error} is not prepared (task=prepare)"]
    except ConfigError as error:
        return steps, [f"hours and dollars need the length of an epoch: {error}"]
    inputs = RunInputs(tokenizer, sources, stages)
    rows = {stage.name: shuffled_rows(inputs, stage, seed=config.seed) for stage in stages}
    return {stage.name: stage_steps(rows[stage.name], stage, config=config) for stage in stages}, []


def plan_program(config: Config, trainer: Any, *, shape: Shape, flops: FlopsPerToken) -> Planned:
    """Trace and compile the training step of one batch shape, and read what the compiler made of it."""
    hw, runtime = config.hw, trainer.runtime
    lowered = lowered_step(trainer, shape=shape)
    log.info("train %s: traced in %.1f s", "x".join(map(str, shape)), lowered.trace_seconds)
    folder = paths.absolute(paths.join(config.output_dir, "plans", "compiled"))
    compiled = compile_program(lowered, hw=hw, topology=str(hw.topology), folder=folder)
    log.info("train %s: compiled in %.0f s%s", "x".join(map(str, shape)), compiled.seconds, known_before(compiled))
    memory = chip_memory(lowered, compiled, hw=hw)
    if compiled.memory is None:
        return Planned(lowered, compiled, memory, {}, None, None)
    cost = read_program(compiled.optimized_hlo())
    chips = runtime.num_devices if runtime.is_sharded else 1
    tokens = shape[0] * shape[1] * shape[2] // chips
    work = step_work(cost, model_flops=flops.model * tokens, tokens=tokens)
    assert hw.chip is not None
    time = step_time(work, chip=hw.chip, topology=hw.topology, calibration=calibration_of(hw))
    return Planned(lowered, compiled, memory, cost.cycles_by_class, work, time)


def known_before(compiled: Compiled) -> str:
    """Said of an answer that was found."""
    return ", on an earlier occasion" if compiled.is_remembered else ""


def flops_per_token(config: Config, arch: Any, *, seq_len: int) -> FlopsPerToken:
    """FLOPs of the configured training per token."""
    return flops_of_token(
        arch,
        seq_len=seq_len,
        trainable="lora" if config.lora.r else "full",
        lora_rank=config.lora.r,
        targets=config.lora.targets,
    )


def remedies_for(config: Config, *, micro: int, seq_len: int) -> tuple[str, ...]:
    """Settings that take less memory, the mildest first."""
    smaller = max((n for n in range(1, micro) if micro % n == 0), default=None)
    found = [f"trainer.micro_batch_rows={smaller}"] if smaller else []
    if config.hw.parallel == "spmd" and config.sharding.name == "replicated":
        found.append("sharding=fsdp")
    return (*found, f"trainer.seq_len={seq_len // 2}", "a hw with more chips or more memory per chip")


def described(planned: Mapping[Shape, Planned], stages: Sequence[Stage], *, runtime: TracingRuntime) -> list[Program]:
    """The run's programs: those compiled here, and the two small ones that are only counted."""
    programs = []
    for shape, made in planned.items():
        users = tuple(stage.name for stage in stages if shape_of(stage, runtime=runtime) == shape)
        shown = " x ".join(map(str, shape))
        programs.append(Program("train", users, shown, made.compiled.seconds, made.compiled.folder.name))
    return [*programs, Program("eval", (), "held-out rows", None), Program("sample", (), "one row", None)]


def lowered_programs(config: Config) -> list[Lowered]:
    """Every training program of the whole run, traced."""
    runtime = TracingRuntime(config.hw, sharding=config.sharding)
    trainer = planned_trainer(config, runtime)
    trainer.build()
    shapes = dict.fromkeys(shape_of(stage, runtime=runtime) for stage in trainer.inputs.stages)
    return [lowered_step(trainer, shape=shape) for shape in shapes]


def shape_of(stage: Stage, *, runtime: TracingRuntime) -> Shape:
    """(A, R, T) of one process's batch."""
    geometry = stage.geometry
    rows = geometry.micro_rows * geometry.num_devices // runtime.world_size
    return geometry.accumulation, rows, geometry.seq_len


def lowered_step(trainer: Any, *, shape: Shape) -> Lowered:
    """The trainer's step on a batch of this shape."""
    batch = {name: torch.empty(shape, dtype=torch.int32, device="meta") for name in ROW_TENSORS}
    lowered: Lowered = trainer.runtime.lower(
        lambda sent: stepped(trainer, sent),
        name="train",
        batch=batch | {"lr": torch.empty(1, device="meta")},
        rows_dim=1,
        renewed=lambda out: renewed(trainer, out),
    )
    return lowered


def stepped(trainer: Any, batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Any, dict[str, Tensor]]:
    """New parameters, new state and the report of one step."""
    parameters, state, report = trainer.step(trainer.parameters, trainer.state, batch)
    return parameters, state, vars(report)


def renewed(trainer: Any, out: tuple[dict[str, Tensor], Any, dict[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """What `commit` writes: (where the old value lives, the new one)."""
    parameters, state, _ = out
    pairs = [(trainer.parameters[name], new) for name, new in parameters.items()]
    return pairs + [(trainer.state[n][slot], new) for n, slots in state.items() for slot, new in slots.items()]


def planned_trainer(config: Config, runtime: TracingRuntime) -> Any:
    """The configured trainer, with shapes for weights."""
    kind: Any = locate(config.trainer._target_, key="trainer")

    class PlannedTrainer(kind):
        def model_source(self) -> HuggingFaceModel:
            return ShapesOfModel(config.model, seed=config.seed)

    nothing: Any = None  # the step needs no tokenizer
    inputs = RunInputs(nothing, {}, resolve_stages(config))
    return PlannedTrainer(config, runtime, inputs=inputs, outputs=None, watch=Stopwatch())
