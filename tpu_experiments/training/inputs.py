"""What a run is fed: tokenizer, packed rows, stages. Made once before any device, handed to every process."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.curriculum import Geometry, Stage
from tpu_experiments.config.schema import Config
from tpu_experiments.data.batches import Batch, StageRows, fixed_batches
from tpu_experiments.data.prepare import PreparedSource
from tpu_experiments.training.evaluate import host_tensors


@dataclass
class RunInputs:
    """Picklable; the same on every process."""

    tokenizer: PreTrainedTokenizerBase
    sources: dict[str, PreparedSource]
    stages: list[Stage]

    @property
    def prompt_kind(self) -> str:
        """`chat` when a chat source is trained on, else `text`."""
        return "chat" if any(source.kind == "chat" for source in self.sources.values()) else "text"

    @property
    def eval_seq_len(self) -> int:
        """One length for all evaluations: the longest of the stages."""
        return max(stage.geometry.seq_len for stage in self.stages)


def stage_rows(inputs: RunInputs, stage: Stage, *, seed: int) -> StageRows:
    """The training rows of one stage in their seeded order."""
    rows = [inputs.sources[name].train[stage.geometry.seq_len] for name in stage.sources]
    return StageRows(rows, names=list(stage.sources), seed=seed, stage_index=stage.index)


def stage_steps(rows: StageRows, stage: Stage, *, config: Config) -> int:
    """Optimizer steps of a stage."""
    steps = stage.steps
    if stage.epochs is not None:
        steps = rows.steps_for(stage.epochs, global_rows=stage.geometry.global_rows)
    assert steps is not None
    return min(steps, config.trainer.max_stage_steps or steps)


def training_tensors(batch: Batch, geometry: Geometry, *, lr: float) -> dict[str, Tensor]:
    """One process's rows as (A, R, T) int32 and the learning rate as (1,) float32."""
    tensors = {name: t.reshape(geometry.accumulation, -1, geometry.seq_len) for name, t in host_tensors(batch).items()}
    return tensors | {"lr": torch.tensor([lr], dtype=torch.float32)}


def evaluation_batches(inputs: RunInputs, config: Config) -> dict[str, Iterator[Batch]]:
    """Held-out rows of every source in batches of one shape, at most `trainer.max_eval_rows` rows in all."""
    length = inputs.eval_seq_len
    per_source = max(1, config.trainer.max_eval_rows // len(inputs.sources))
    rows = inputs.stages[0].geometry.micro_rows * config.hw.num_devices
    return {
        name: fixed_batches(source.evaluation[length].take(slice(0, per_source)), global_rows=rows)
        for name, source in inputs.sources.items()
        if source.evaluation[length].num_rows
    }


def expected_programs(inputs: RunInputs, config: Config) -> int:
    """Compiled programs of a whole run: one per training shape, one evaluation, one sample."""
    shapes = {(s.geometry.accumulation, s.geometry.micro_rows, s.geometry.seq_len) for s in inputs.stages}
    return len(shapes) + 1 + (1 if config.sample.max_new_tokens else 0)
