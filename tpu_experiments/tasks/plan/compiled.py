"""Plan with the TPU's own compiler: trace here, compile in parallel processes, combine the results."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import replace

import psutil
from tqdm import tqdm

from tpu_experiments.config.curriculum import Geometry
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import flags_of
from tpu_experiments.config.model_schema import ranks_of
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import PlanTaskConfig
from tpu_experiments.objectives.base import trained_flops
from tpu_experiments.planning.check import remedies_for
from tpu_experiments.planning.compiled import Compiled, Compilers, Planned, planned, shortage_of, widths_of_step
from tpu_experiments.planning.decoding import Decoding
from tpu_experiments.planning.length import OutsideSteps
from tpu_experiments.planning.orders import Changed, Order, differences, orders_of
from tpu_experiments.planning.plan import Plan, Program, plan_of
from tpu_experiments.planning.stored_plans import compiled_folder
from tpu_experiments.planning.timing import calibration_of
from tpu_experiments.planning.tuned import tuned_notes
from tpu_experiments.runtime.lowered import Lowered
from tpu_experiments.runtime.processes.env import exported_flags
from tpu_experiments.tasks.plan.decoding import Submitted, submit_decoding
from tpu_experiments.tasks.plan.formulas import counted_only, with_run
from tpu_experiments.tasks.plan.programs import Traced, trace_run
from tpu_experiments.tasks.plan.rollouts import (
    answers_of,
    notes_of,
    planned_iteration,
    short_of_answers,
    writes_rollouts,
)

GIB_PER_COMPILE = 6.0  # peak while compiling a 7B step, with a margin
OfOrders = dict[tuple[int, ...], list[Future[Compiled]]]
"""Order of the chips to the compilations of the training programs for it."""


def compiled_plans(
    configs: Sequence[Config], settings: PlanTaskConfig, *, which: str, seconds: float | None = None
) -> list[Plan | ConfigError]:
    """Return a plan for every config, or the error that prevented it.

    Args:
        settings: workers, cache of compilations (below the first config's output_dir where none is named), and the
            compiler's environment.
        which: `all` or `train`, the programs that are compiled.
        seconds: for the compilations, once the programs are traced; None: as long as they take.

    Raises:
        TimeoutError: they took longer, and were ended.
    """
    folder = compiled_folder(settings, output_dir=configs[0].output_dir)
    traced: list[Traced | ConfigError] = []
    futures: dict[int, list[Future[Compiled]]] = {}
    answers: dict[int, Submitted] = {}
    of_orders: dict[int, OfOrders] = {}
    with Compilers(settings.workers or usable_workers(), libtpu=settings.libtpu) as compilers:
        for number, config in enumerate(tqdm(configs, desc="tracing", leave=False, disable=None)):
            try:
                run = trace_run(config, which=which)
                written = answers_of(config, settings.decode)
                if written.rows is not None and which == "all":
                    answers[number] = submit_decoding(
                        config, written, compilers=compilers, folder=folder, merges=run.merges
                    )
            except ConfigError as error:
                traced.append(error)
                continue
            traced.append(run)
            futures[number] = [compilers.submit(p, hw=config.hw, folder=folder) for p in run.programs]
            of_orders[number] = {
                order: [compilers.submit(p, hw=config.hw, folder=folder, order=order) for p in training_of(run)]
                for order in orders_of(config.hw.num_devices, count=settings.orders)[1:]
            }
        every = {future for group in futures.values() for future in group}
        every |= {future for orders in of_orders.values() for group in orders.values() for future in group}
        every |= {future for submitted in answers.values() for future in submitted.futures}
        for future in tqdm(
            as_completed(every, timeout=seconds), total=len(every), desc="compiling", leave=False, disable=None
        ):
            refusal = future.exception()
            if len(configs) == 1 and isinstance(refusal, ConfigError):
                compilers.stop()  # the other compilations are not needed
                return [refusal]
    return [
        plan_or_error(run, futures.get(n, []), of_orders=of_orders.get(n, {}), answers=answers.get(n))
        for n, run in enumerate(traced)
    ]


def training_of(run: Traced) -> list[Lowered]:
    """Return the training programs of a run."""
    return [program for program in run.programs if program.name == "train"]


def usable_workers() -> int:
    """Return the parallel compilations that fit the free memory and this process's cores."""
    by_memory = int(psutil.virtual_memory().available / 2**30 / GIB_PER_COMPILE)
    return max(1, min(by_memory, len(os.sched_getaffinity(0))))


def plan_or_error(
    run: Traced | ConfigError,
    futures: Sequence[Future[Compiled]],
    *,
    of_orders: OfOrders,
    answers: Submitted | None = None,
) -> Plan | ConfigError:
    """Return the plan of one traced run whose programs are compiled, or the error of one of them."""
    if isinstance(run, ConfigError):
        return run
    try:
        programs = [read(run, program, future.result()) for program, future in zip(run.programs, futures, strict=True)]
        training = [program for program in programs if program.name == "train"]
        orders = tuple(compared(order, training, others) for order, others in of_orders.items())
        kept = max(program.memory.arguments for program in training)
        found = plan_of_run(run, programs, decoding=answers.planned(kept_gib=kept) if answers is not None else None)
        if answers is not None and writes_rollouts(run.config):
            found = replace(found, programs=(*found.programs, *answers.programs_of_run(kept_gib=kept)))
    except ConfigError as error:
        return error
    return replace(found, orders=orders)


def compared(order: tuple[int, ...], usual: Sequence[Planned], others: Sequence[Future[Compiled]]) -> Order:
    """Return what the training programs of another order of the chips do otherwise; nothing of those too large."""
    changed: dict[Changed, None] = {}
    rest = 0
    for program, other in zip(usual, (future.result() for future in others), strict=True):
        if program.compiled.memory is not None and other.memory is not None:
            own, count = differences(program.compiled.optimized_hlo(), other.optimized_hlo())
            changed |= dict.fromkeys(own)
            rest += count
    return Order(order, tuple(changed), rest)


def read(run: Traced, program: Lowered, compiled: Compiled) -> Planned:
    """Return one program with its memory, work and time."""
    is_training = program.name == "train"
    flops = trained_flops(run.config, run.arch, seq_len=program.shape[-1]) if is_training else None
    ranks, trained = ranks_of(run.config.lora), run.trained
    widths = widths_of_step(program, run.arch, ranks=ranks, trained=trained) if is_training else None
    return planned(program, compiled, hw=run.config.hw, trained=trained, flops=flops, widths=widths)


def plan_of_run(run: Traced, programs: Sequence[Planned], *, decoding: Decoding | None) -> Plan:
    """Combine the programs of a run, and the answers that it writes, into its plan."""
    largest = max(programs, key=lambda program: program.memory.total)
    train = max((p for p in programs if p.name == "train"), key=lambda program: program.memory.total)
    assert train.flops is not None
    geometry = geometry_of(run, train)
    plan = plan_of(
        run.config,
        run.arch,
        run.stages,
        geometry=geometry,
        fits=True,
        memory=largest.memory,
        largest_program=largest.name,
        flops=train.flops,
        calibration=calibration_of(run.config.hw, libtpu=train.compiled.libtpu),
        programs=tuple(run_programs(run, programs)),
        work=train.work,
        cycles_by_class=train.cycles_by_class,
        time=train.time,
        seconds_by_part=train.seconds_by_part,
        versions=train.compiled.versions,
        flags=tuple(flags_of(run.config.hw, exported=exported_flags())),
        notes=(*compiler_notes(run, train), *dict.fromkeys(note for program in programs for note in program.notes)),
        decoding=decoding,
    )
    short = plan_if_too_large(plan, run=run, largest=largest, geometry=geometry) or short_of_answers(plan, run.config)
    return short or with_length(plan, run=run, programs=programs)


def compiler_notes(run: Traced, program: Planned) -> list[str]:
    """Return a note on the compiler where it is another environment's (task.libtpu)."""
    if not isinstance(run.config.task, PlanTaskConfig) or run.config.task.libtpu is None:
        return []
    return [
        f"compiled by libtpu {program.compiled.libtpu} of {run.config.task.libtpu}: its estimates are not comparable "
        "with those of another version, and the run is compiled by its own environment's"
    ]


def plan_if_too_large(plan: Plan, *, run: Traced, largest: Planned, geometry: Geometry) -> Plan | None:
    """Return the plan of a run that does not fit, with the reason; None if it fits."""
    rows, seq_len = geometry.micro_rows, geometry.seq_len
    shortage = shortage_of(largest, arch=run.arch, rows=rows, seq_len=seq_len, remedies=())
    if shortage is None:
        return None
    remedies = remedies_for(run.config, run.arch, memory=plan.memory, geometry=geometry)
    return replace(plan, fits=False, time=None, shortage=replace(shortage, remedies=remedies))


def with_length(plan: Plan, *, run: Traced, programs: Sequence[Planned]) -> Plan:
    """Return the plan with the length and cost of the whole run."""
    of_shape = {p.shape: p.time for p in programs if p.name == "train"}
    seconds = {p.name: p.time.total_s if p.time else None for p in programs if p.name != "train"}
    longest = max(run.stages, key=lambda stage: stage.geometry.seq_len)
    step = of_shape[run.shapes[longest.name]]
    iteration = planned_iteration(
        run.config,
        longest,
        decoding=plan.decoding,
        score_batch_seconds=seconds.get("score"),
        step_seconds=step.total_s if step else None,
    )
    of_answers = plan.decoding.compile_seconds if plan.decoding and writes_rollouts(run.config) else 0.0
    outside = OutsideSteps(
        base_gib=plan.memory.classes.get("base weights", 0.0),
        eval_rows=run.stages[0].geometry.micro_rows * run.stages[0].geometry.num_shards,
        eval_batch_seconds=seconds.get("eval"),
        reference_batch_seconds=seconds.get("reference"),
        sample_token_seconds=seconds.get("sample"),
        compile_seconds=sum(p.compiled.seconds for p in programs) + of_answers,
        rollout_seconds=iteration.rollout_seconds if iteration else 0.0,
        answer_seconds=(plan.decoding.seconds or 0.0) if iteration and plan.decoding else 0.0,
    )
    times = {stage.name: of_shape[run.shapes[stage.name]] for stage in run.stages}
    notes = tuned_notes(run.config, plan.time.tokens_per_second_per_chip) if plan.time else []
    found = replace(plan, notes=(*notes, *notes_of(run.config), *plan.notes), iteration=iteration)
    return with_run(found, run.config, run.stages, times=times, outside=outside)


def geometry_of(run: Traced, program: Planned) -> Geometry:
    """Return the geometry of the stage that a training program belongs to."""
    return next(stage.geometry for stage in run.stages if run.shapes[stage.name] == program.shape)


def run_programs(run: Traced, programs: Sequence[Planned]) -> Iterator[Program]:
    """Yield the run's programs; those that are only counted come last."""
    for program in programs:
        users = tuple(name for name, shape in run.shapes.items() if (program.name, shape) == ("train", program.shape))
        yield Program(
            name=program.name,
            stages=users,
            shape=" x ".join(map(str, program.shape)),
            compile_seconds=program.compiled.seconds,
            total_gib=program.memory.total,
            estimated_seconds=program.time.total_s if program.time else None,
            fingerprint=program.compiled.folder.name,
        )
    if not any(program.name == "eval" for program in programs):
        yield from counted_only(run.config)
