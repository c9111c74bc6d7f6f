"""Lower every program of the run on placeholders: training step, evaluation, reference, sample, questions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpu_experiments.config.curriculum import Stage, resolve_stages
from tpu_experiments.config.data_schema import QUESTION_ROWS
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import PlanTaskConfig
from tpu_experiments.data.rows import TOKEN_ARRAYS, Array
from tpu_experiments.metrics.goodput import Stopwatch
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.parts.bitnet import MIX
from tpu_experiments.models.parts.dropout import NOISE
from tpu_experiments.objectives.base import row_arrays, samples, writes_text
from tpu_experiments.runtime.lowered import Lowered
from tpu_experiments.runtime.sharding import check_heads
from tpu_experiments.runtime.tracing import tracing_runtime
from tpu_experiments.tasks.plan.formulas import shapes_source
from tpu_experiments.tasks.plan.rollouts import num_scores, writes_rollouts
from tpu_experiments.training.batches import RunInputs, evaluation_rows, has_noise
from tpu_experiments.training.evaluation import WORDS, evaluating
from tpu_experiments.training.merged import MergedCopy
from tpu_experiments.training.pack import Pack, part_of
from tpu_experiments.training.reference import ReferencePass
from tpu_experiments.training.rl import trainer_class
from tpu_experiments.training.step import ACTIVE, stage_tensors

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Traced:
    """Programs of a run before compilation."""

    config: Config
    stages: list[Stage]
    arch: Any
    """The model's transformers config."""
    trained: frozenset[str]
    """Names of the trainable parameters."""
    shapes: dict[str, Shape]
    """Batch shape (A, R, T) of each stage, by name."""
    programs: list[Lowered]
    """One training program per shape, then evaluation, reference, scores of a rollout, sample and questions."""
    merges: tuple[Lowered, ...] = ()
    """The program that makes a copy of the weights for answers (task.decode.rows, or a rollout), then the one of their
    averages, with which a run of rollouts answers held-out prompts (optim.ema)."""


def trace_run(config: Config, *, which: str) -> Traced:
    """Lower the run's programs; `which` is `all` or `train`."""
    runtime = tracing_runtime(config.hw, sharding=config.sharding)
    trainer = planned_trainer(config, runtime)
    check_heads(runtime.mesh, trainer.model_source().config)
    num_adapters = config.task.pack if isinstance(config.task, PlanTaskConfig) else 1
    pack = built_pack(trainer, num=num_adapters) if num_adapters > 1 else None
    if pack is None:
        trainer.build()
    stages: list[Stage] = trainer.inputs.stages
    shapes = {stage.name: shape_of(stage, runtime=runtime) for stage in stages}
    programs = [
        lowered_step(trainer, shape=shape) if pack is None else lowered_pack(pack, shape=shape)
        for shape in dict.fromkeys(shapes.values())
    ]
    which = which if pack is None else "train"  # the others are the runs' own, one after the other
    if which == "all":
        programs.append(lowered_evaluation(trainer, shape=evaluation_shape(stages, runtime=runtime)))
    if which == "all" and config.objective.reads_reference():
        programs.append(lowered_reference(trainer, shape=evaluation_shape(stages, runtime=runtime)))
    if which == "all" and num_scores(config):
        programs.append(lowered_score(trainer, shape=score_shape(stages, runtime=runtime)))
    if which == "all" and samples(config):
        programs.append(lowered_sample(trainer, rows=len(config.sample.all_prompts)))
    if which == "all" and config.questions:
        programs.append(lowered_sample(trainer, rows=QUESTION_ROWS, name="ask"))
    arch, trained = trainer.model.source.config, frozenset(trainer.parameters)
    writes = which == "all" and isinstance(config.task, PlanTaskConfig) and config.task.decode.rows is not None
    writes = (writes and writes_text(config)) or (which == "all" and writes_rollouts(config))
    merges = tuple(lowered_merges(trainer)) if writes else ()
    return Traced(config, stages, arch, trained, shapes, programs, merges)


def planned_trainer(config: Config, runtime: Any) -> Any:
    """Return the configured trainer, whose weights are shapes without data."""
    kind: Any = trainer_class(config)

    class PlannedTrainer(kind):
        def model_source(self) -> HuggingFaceModel:
            return shapes_source(config)

    nothing: Any = None  # no program needs the tokenizer
    inputs = RunInputs(nothing, {}, resolve_stages(config))
    return PlannedTrainer(config, runtime, inputs=inputs, outputs=None, watch=Stopwatch())


def shape_of(stage: Stage, *, runtime: Any) -> Shape:
    """Return (A, R, T) of one process's training batch."""
    geometry = stage.geometry
    rows = geometry.micro_rows * geometry.num_shards // runtime.share[1]
    return geometry.accumulation, rows, geometry.seq_len


def evaluation_shape(stages: list[Stage], *, runtime: Any) -> tuple[int, int]:
    """Return (R, T) of one process's evaluation batch, as in training/batches.py."""
    rows = evaluation_rows(stages) // runtime.share[1]
    return rows, max(stage.geometry.seq_len for stage in stages)


def lowered_step(trainer: Any, *, shape: Shape) -> Lowered:
    """Lower the trainer's step on a batch of this shape."""
    lowered: Lowered = trainer.runtime.lower(
        lambda sent: stepped(trainer, sent),
        name="train",
        batch=batch_like(shape, trainer=trainer) | added_like(trainer),
        rows_dim=1,
        renewed=lambda out: renewed(trainer, out),
        as_run=trainer.step_program,
    )
    return lowered


def built_pack(first: Any, *, num: int) -> Pack:
    """Build several runs like `first`, and it, as they train in one program (training/pack.py)."""
    config, runtime = first.config, first.runtime
    pack = Pack(runtime, [str(number) for number in range(num)], loras=[config.lora] * num)
    trainers = [first, *(planned_trainer(config, runtime) for _ in range(num - 1))]
    for seat, trainer in zip(pack.seats, trainers, strict=True):
        trainer.seat = seat
        trainer.build()
    return pack


def lowered_pack(pack: Pack, *, shape: Shape) -> Lowered:
    """Lower the step of a pack on batches of this shape, one for each adapter."""
    trainers, step = pack.trainers, pack.step()
    batch: dict[str, Tensor] = {}
    for k, trainer in enumerate(trainers):
        own = batch_like(shape, trainer=trainer) | added_like(trainer) | {ACTIVE: torch.empty(1, device="meta")}
        batch |= {f"{name}@{k}": tensor for name, tensor in own.items()}
    batch["scales"] = torch.empty(len(trainers), device="meta")
    batch["thresholds"] = torch.empty(len(trainers), dtype=torch.int32, device="meta")

    def stepped(sent: Mapping[str, Tensor]) -> list[tuple[Any, ...]]:
        found = step(
            [trainer.parameters for trainer in trainers],
            [trainer.state for trainer in trainers],
            [part_of(sent, k) for k in range(len(trainers))],
            scales=sent["scales"],
            thresholds=sent["thresholds"],
        )
        return [(parameters, state, vars(report), {}) for parameters, state, report in found]

    lowered: Lowered = pack.runtime.lower(  # type: ignore[attr-defined]  # a plan's
        stepped,
        name="train",
        batch=batch,
        rows_dim=1,
        renewed=lambda out: [
            pair for trainer, own in zip(trainers, out, strict=True) for pair in renewed(trainer, own)
        ],
        num_adapters=len(trainers),
        as_run=pack.program(),
    )
    return lowered


def lowered_evaluation(trainer: Any, *, shape: tuple[int, int]) -> Lowered:
    """Lower the sums over one batch of held-out rows."""
    with evaluating(trainer.model.module):
        lowered: Lowered = trainer.runtime.lower(
            trainer.evaluator.sums,
            name="eval",
            batch=rows_like(shape, names=trainer.evaluator.tensor_names, arrays=row_arrays(trainer.config)),
            rows_dim=0,
            as_run=trainer.evaluator.program,
        )
    return lowered


def lowered_reference(trainer: Any, *, shape: tuple[int, int]) -> Lowered:
    """Lower the values of one batch of rows that the loss compares with."""
    reference = ReferencePass(trainer, parameters=trainer.evaluated_parameters)
    with evaluating(trainer.model.module):
        lowered: Lowered = trainer.runtime.lower(
            reference.values,
            name="reference",
            batch=rows_like(shape, names=trainer.evaluator.tensor_names, arrays=row_arrays(trainer.config)),
            rows_dim=0,
            as_run=reference.program,
        )
    return lowered


def score_shape(stages: list[Stage], *, runtime: Any) -> tuple[int, int]:
    """Return (R, T) of one process's batch of answers that are scored, of the stage with the longest rows."""
    geometry = max((stage.geometry for stage in stages), key=lambda each: each.seq_len)
    return geometry.micro_rows * geometry.num_shards // runtime.share[1], geometry.seq_len


def lowered_score(trainer: Any, *, shape: tuple[int, int]) -> Lowered:
    """Lower the log-probabilities of one batch of a rollout's rows."""
    names = trainer.evaluator.tensor_names
    with evaluating(trainer.model.module):
        lowered: Lowered = trainer.runtime.lower(
            trainer.score.values,
            name="score",
            batch=rows_like(shape, names=names, arrays=row_arrays(trainer.config)),
            rows_dim=0,
            as_run=trainer.score.program,
        )
    return lowered


def lowered_sample(trainer: Any, *, rows: int, name: str = "sample") -> Lowered:
    """Lower one token of the samples, or of the answers to questions."""
    sampler = trainer.prompted.sampler if name == "sample" else trainer.prompted.asker
    batch = sample_like(sampler, rows=rows)
    with evaluating(trainer.model.module):
        lowered: Lowered = trainer.runtime.lower(
            sampler.next_token, name=name, batch=batch, rows_dim=-1, as_run=sampler.program
        )
    return lowered


def lowered_merges(trainer: Any) -> Iterator[Lowered]:
    """Lower the program that makes a copy of the current weights to write answers with, and that of their averages."""
    config = trainer.config
    averages = trainer.evaluated_parameters if config.optim.is_averaged and writes_rollouts(config) else None
    copy = MergedCopy(trainer.model, lora=config.lora, runtime=trainer.runtime, averages=averages)
    unread = {"none": torch.empty(1, device="meta")}
    for parameters, as_run in ((trainer.parameters, copy.program), (averages, copy.program_of_averages)):
        if parameters is not None:
            merged = partial(copy.merged, parameters=parameters)
            name = "merge" if parameters is trainer.parameters else "merge averages"
            with torch.no_grad():
                lowered: Lowered = trainer.runtime.lower(merged, name=name, batch=unread, rows_dim=-1, as_run=as_run)
            yield lowered


def sample_like(sampler: Any, *, rows: int) -> dict[str, Tensor]:
    """Return placeholders for the texts that a sampler continues."""
    shapes = {"ids": (rows, sampler.window), "last": (rows,)} | ({WORDS: (rows,)} if sampler.temperature else {})
    return {name: torch.empty(shape, dtype=torch.int32, device="meta") for name, shape in shapes.items()}


def rows_like(
    shape: tuple[int, ...], *, names: Sequence[str] = TOKEN_ARRAYS, arrays: Sequence[Array] = ()
) -> dict[str, Tensor]:
    """Return placeholders for a batch of rows."""
    known = [Array(name, "int32", per="row" if name == NOISE else "token") for name in names]
    return {
        array.name: torch.empty(array.shape(shape), dtype=getattr(torch, array.dtype), device="meta")
        for array in (*known, *arrays)
    }


def batch_like(shape: Shape, *, trainer: Any) -> dict[str, Tensor]:
    """Return placeholders for a training batch."""
    batch = rows_like(shape, arrays=row_arrays(trainer.config, are_trained=True)) | {
        "lr": torch.empty(1, device="meta")
    }
    if trainer.config.model.linear_warmup_steps:
        batch[MIX] = torch.empty(shape[:2], device="meta")
    if has_noise(trainer.config, trainer.model.module):
        batch[NOISE] = torch.empty(shape[:2], dtype=torch.int32, device="meta")
    return batch


def added_like(trainer: Any) -> dict[str, Tensor]:
    """Return placeholders for what stages add to their batches: trainable masks and weight decay."""
    stages = trainer.inputs.stages
    added = stage_tensors(stages[0], trainer.parameters, stages=stages)
    return {name: numbers.to("meta") for name, numbers in added.items()}


def stepped(trainer: Any, batch: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Return the new parameters, new optimizer state and report of one step, and the weights that it writes into."""
    parameters, state, report, weights = trainer.stepped(batch)
    return parameters, state, vars(report), weights


def renewed(trainer: Any, out: tuple[Any, ...]) -> list[tuple[Tensor, Tensor]]:
    """Return (old tensor, new tensor) for everything that a step updates in place."""
    parameters, state, _, weights = out
    pairs = [(trainer.parameters[name], new) for name, new in parameters.items()]
    pairs += [(trainer.model.module.get_submodule(path).weight, new) for path, new in weights.items()]
    return pairs + [(trainer.state[n][slot], new) for n, slots in state.items() for slot, new in slots.items()]
