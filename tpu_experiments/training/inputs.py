"""What a run is fed: tokenizer, prepared rows, stages, and the batches of each stage.

`RunInputs` is made once before any device and handed to every process.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.curriculum import Geometry, Stage
from tpu_experiments.config.schema import Config
from tpu_experiments.config.sources import QUESTION_ROWS
from tpu_experiments.data.batches import (
    Batch,
    StageRows,
    WrittenRows,
    fixed_batches,
    learning_all,
    trimmed,
)
from tpu_experiments.data.prepared import PreparedSource
from tpu_experiments.data.replay import ReplayedRows
from tpu_experiments.data.steps.epochs import WrittenEpoch
from tpu_experiments.optim.schedules import multiplier
from tpu_experiments.training.evaluate import host_tensors
from tpu_experiments.training.questions import Question
from tpu_experiments.training.start import StartPoint

REPLAY_STAGE = 2**16
"""Added to a stage's number where the order of its replayed rows is drawn, which are in an order of their own."""
NOISE_STREAM = 2**192
"""Counter of Philox from which on the words of dropout are; the orders of rows are drawn from 0 on."""


@dataclass
class RunInputs:
    """Picklable; the same on every process."""

    tokenizer: PreTrainedTokenizerBase
    sources: dict[str, PreparedSource]
    stages: list[Stage]
    written: dict[int, list[WrittenEpoch]] = field(default_factory=dict)
    """Written epochs by the index of their stage; used with `loader.order=written`."""
    questions: dict[str, list[Question]] = field(default_factory=dict)
    """Those of every set, by its name."""
    start: StartPoint | None = None
    """What the run starts from; None too where it goes on from a checkpoint of its own."""

    @property
    def audit_hashes(self) -> dict[str, str]:
        """`<source>@<row length>` to the hash of what the data is."""
        return {key: value for source in self.sources.values() for key, value in source.audit_hashes.items()}

    @property
    def prompt_kind(self) -> str:
        """`chat` when a chat source is trained on, else `text`."""
        return "chat" if any(source.kind == "chat" for source in self.sources.values()) else "text"

    @property
    def eval_seq_len(self) -> int:
        """One length for all evaluations: the longest of the stages."""
        return max(stage.geometry.seq_len for stage in self.stages)


@dataclass(frozen=True)
class StepInfo:
    """What the host knows about the batch of one step."""

    stage_step: int
    lr: float
    labels: list[str]
    """`source:row` of every row of this process."""
    global_labels: list[str]
    """The same of the global batch."""
    num_tokens: int
    """Tokens of the global batch that are not padding."""
    is_last: bool
    """Whether the stage ends with it."""


def stage_rows(inputs: RunInputs, stage: Stage, *, config: Config) -> ReplayedRows:
    """The training rows of one stage in the order of `loader.order`; replayed ones are read in a permutation.

    Raises:
        ConfigError: the stage needs more epochs than were written.
    """
    rows = shuffled_rows(inputs, stage, seed=config.seed)
    if config.loader.order == "permutation":
        return rows
    epochs = inputs.written.get(stage.index, [])
    num_rows = stage_steps(rows, stage, inputs=inputs, config=config) * stage.geometry.global_rows
    positions = num_rows - rows.num_replayed(num_rows)
    written = WrittenRows(
        [epoch.rows for epoch in epochs],
        origins=[epoch.origins_N for epoch in epochs],
        names=stage.sources,
        counts=rows.own.counts,
        num_positions=positions if stage.epochs is None else min(positions, rows.total_for(stage.epochs)),
    )
    return replace(rows, own=written)


def shuffled_rows(inputs: RunInputs, stage: Stage, *, seed: int) -> ReplayedRows:
    """The training rows of one stage in a permutation of each epoch."""

    def rows_of(names: Sequence[str], stage_index: int) -> StageRows:
        parts = [inputs.sources[name].store("train", stage.geometry.seq_len) for name in names]
        return StageRows(parts, names=names, seed=seed, stage_index=stage_index)

    own = rows_of(stage.sources, stage.index)
    if not stage.replay:
        return ReplayedRows(own)
    return ReplayedRows(own, rows_of(stage.replay_sources, REPLAY_STAGE + stage.index), Fraction(str(stage.replay)))


def stage_steps(rows: ReplayedRows, stage: Stage, *, inputs: RunInputs, config: Config) -> int:
    """Optimizer steps of a stage, if it does not end before."""
    steps, global_rows = stage.steps, stage.geometry.global_rows
    if stage.epochs is not None:
        steps = rows.steps_for(stage.epochs, global_rows=global_rows)
    if stage.tokens is not None:
        steps = math.ceil(stage.tokens / (global_rows * tokens_of_a_row(inputs, stage)))
    assert steps is not None
    return min(steps, config.trainer.max_stage_steps or steps)


def num_steps(inputs: RunInputs, stage: Stage, *, config: Config) -> int:
    """The same, with the rows of `stage_rows`."""
    return stage_steps(stage_rows(inputs, stage, config=config), stage, inputs=inputs, config=config)


def steps_by_stage(inputs: RunInputs, *, config: Config) -> dict[str, int]:
    """The same of every stage by its name, in order."""
    return {stage.name: num_steps(inputs, stage, config=config) for stage in inputs.stages}


def tokens_of_a_row(inputs: RunInputs, stage: Stage) -> float:
    """Mean over the rows of a stage, without padding."""
    own, replayed = (
        _mean_tokens(inputs, names, stage.geometry.seq_len) for names in (stage.sources, stage.replay_sources)
    )
    return (1 - stage.replay) * own + stage.replay * replayed


def _mean_tokens(inputs: RunInputs, names: Sequence[str], seq_len: int) -> float:
    splits = [inputs.sources[name].manifests[seq_len]["splits"]["train"] for name in names]
    return sum(split["tokens"] for split in splits) / max(1, sum(split["rows"] for split in splits))


def step_batches(
    rows: ReplayedRows,
    stage: Stage,
    *,
    num_steps: int,
    config: Config,
    first: int,
    process: tuple[int, int],
    choice: Mapping[str, Tensor],
    left_out: Collection[int] = (),
) -> Iterator[tuple[StepInfo, dict[str, Tensor]]]:
    """The batches of a stage from step `first` to its last; `process` is (rank, world size).

    A batch depends on its step alone: a run that goes on, on whatever devices, takes the row after the last one. The
    steps `left_out` have a place in the schedule and no batch. `choice` goes into every batch (training/chosen.py).
    """
    geometry = stage.geometry
    total = None if stage.epochs is None else rows.total_for(stage.epochs)
    last = next((step for step in range(num_steps - 1, first, -1) if step not in left_out), first)
    for step in range(first, num_steps):
        if step in left_out:
            continue
        lr = stage.lr * multiplier(stage.schedule, step=step, num_steps=num_steps)
        whole = cut(rows.batch(step, global_rows=geometry.global_rows, num_total=total), config=config)
        whole = learning_all(whole) if stage.learn == "all" else whole
        whole = with_noise(whole, stage.index, step, config=config)
        mine = whole.slice_process(*process)
        info = StepInfo(step, lr, mine.labels, whole.labels, whole.num_tokens, is_last=step == last)
        yield info, {**training_tensors(mine, geometry, lr=lr), **choice}


def training_tensors(batch: Batch, geometry: Geometry, *, lr: float) -> dict[str, Tensor]:
    """One process's rows as (A, R, T) int32, their noise as (A, R), and the learning rate as (1,) float32."""
    tensors = {n: t.reshape(geometry.accumulation, -1, *t.shape[1:]) for n, t in host_tensors(batch).items()}
    return tensors | {"lr": torch.tensor([lr], dtype=torch.float32)}


def has_dropout(config: Config) -> bool:
    """Whether the training step drops anything."""
    return config.lora.r > 0 and config.lora.dropout > 0


def with_noise(batch: Batch, stage: int, step: int, *, config: Config) -> Batch:
    """The global batch of a stage's step with a random word for every row, where the training step has dropout.

    They depend on seed, stage, step and the row's number in the global batch: on no device, process or micro-batch.
    """
    if not has_dropout(config):
        return batch
    key = np.array([config.seed % 2**64, stage << 32 | step], np.uint64)
    words_G = np.random.Philox(key=key, counter=NOISE_STREAM).random_raw(batch.num_rows)
    return replace(batch, noise_G=(words_G >> np.uint64(32)).astype(np.uint32).view(np.int32))


def cut(batch: Batch, *, config: Config) -> Batch:
    """With `prepare.packing=none` the global batch without what is padding in all its rows."""
    return trimmed(batch, multiple=config.loader.pad_multiple) if config.prepare.packing == "none" else batch


def evaluation_batches(inputs: RunInputs, config: Config) -> dict[str, Iterable[Batch]]:
    """Held-out rows of every source in batches of one shape, at most `trainer.max_eval_rows` rows in all."""
    per_source = max(1, config.trainer.max_eval_rows // len(inputs.sources))
    global_rows = evaluation_rows(inputs.stages)
    held_out = {name: source.store("evaluation", inputs.eval_seq_len) for name, source in inputs.sources.items()}
    return {
        name: (cut(b, config=config) for b in fixed_batches(rows.take(slice(0, per_source)), global_rows=global_rows))
        for name, rows in held_out.items()
        if rows.num_rows
    }


def evaluation_rows(stages: Sequence[Stage]) -> int:
    """Rows of one batch of held-out rows: a micro-batch of the first stage with the longest rows, on every device."""
    longest = max((stage.geometry for stage in stages), key=lambda geometry: geometry.seq_len)
    return longest.micro_rows * longest.num_shards


def program_shapes(inputs: RunInputs, config: Config, *, world_size: int) -> dict[str, set[tuple[int, ...]]]:
    """Shapes of the token ids of one process for every program of a whole run, by the program's name.

    Training takes (A, R, T) of each stage; evaluation one (R, T); the sample its window, and so do questions.
    """
    geometries = [stage.geometry for stage in inputs.stages]
    rows = evaluation_rows(inputs.stages) // world_size
    return {
        "train": {(g.accumulation, g.micro_rows * g.num_shards // world_size, g.seq_len) for g in geometries},
        "evaluate": {(rows, inputs.eval_seq_len)},
        "sample": {(len(config.sample.all_prompts), config.sample.window)} if config.sample.max_new_tokens else set(),
        "ask": {(QUESTION_ROWS, config.sample.window)} if config.questions else set(),
    }


def expected_programs(inputs: RunInputs, config: Config) -> int:
    """Compiled programs of a whole run: one per training shape, one evaluation, one sample, one for questions."""
    return sum(len(shapes) for shapes in program_shapes(inputs, config, world_size=1).values())
