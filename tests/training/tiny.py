"""A tiny model, its step and random batches, for tests that compare numbers."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpu_experiments.checkpoint.state import flat
from tpu_experiments.config.schema import Config, OptimConfig
from tpu_experiments.models.adapters.padded import with_adapters
from tpu_experiments.models.parts.dropout import NOISE
from tpu_experiments.models.sources.build import BuiltModel, build_model
from tpu_experiments.objectives.base import model_source
from tpu_experiments.objectives.next_token import count_next_tokens, next_token_loss
from tpu_experiments.optim.adamw import AdamW
from tpu_experiments.optim.base import Named, Optimizer, State
from tpu_experiments.optim.facts import facts_of
from tpu_experiments.optim.muon import Muon, spread_over
from tpu_experiments.optim.updates import Updates, updates_of
from tpu_experiments.training.step import Count, RowLoss, TrainStep, commit

ARCHITECTURES = ("mistral7b", "gemma3_270m", "qwen05b")


def built(config: Config, runtime: Any) -> BuiltModel:
    """The configured model on the runtime's device."""
    source = model_source(config)
    given: dict[str, Any] = {"place": runtime.place, "folding": runtime.folding, "is_trained": True}
    return build_model(source, lora=config.lora, seed=config.seed, **given)


def plain_config(run: "Run") -> Any:
    """The run's model for transformers itself, which makes masks of its own."""
    config = copy.deepcopy(run.model.source.config)
    config._attn_implementation = "sdpa"
    return config


def random_batch(
    seed: int, *, accumulation: int = 1, rows: int = 4, seq_len: int = 32, lr: float = 1e-3, dropout: float = 0.0
) -> dict[str, Tensor]:
    """(A, R, T) rows of two packed documents and some padding, about two thirds of the tokens learnt.

    With `dropout` they have their noise (A, R).
    """
    generator = np.random.Generator(np.random.Philox(key=seed))
    shape = (accumulation, rows, seq_len)
    border, end = seq_len // 3, seq_len - 3
    index = np.arange(seq_len)
    segments = np.where(index < border, 1, np.where(index < end, 2, 0))
    positions = np.where(index < border, index, np.where(index < end, index - border, 0))
    host = {
        "ids": generator.integers(5, 4000, shape),
        "learn": generator.random(shape) < 0.67,
        "positions": np.broadcast_to(positions, shape),
        "segments": np.broadcast_to(segments, shape),
    }
    tensors = {name: torch.from_numpy(np.ascontiguousarray(a).astype(np.int32)) for name, a in host.items()}
    if dropout:
        noise = generator.integers(-(2**31), 2**31, shape[:2], dtype=np.int32)
        tensors[NOISE] = torch.from_numpy(noise)
    return tensors | {"lr": torch.tensor([lr])}


def plain_updates(
    parameters: Named,
    *,
    optimizer: Optimizer | None = None,
    weight_decay: float = 0.01,
    clip_norm: float | None = 1.0,
    is_scaled: bool = False,
    **settings: Any,
) -> Updates:
    """Updates by an optimizer itself, AdamW by default, of one group of parameters."""
    facts = facts_of(OptimConfig(clip_norm=clip_norm, **settings), parameters)
    return Updates(optimizer or AdamW(beta1=0.9, beta2=0.95, eps=1e-8), facts, weight_decay, is_scaled=is_scaled)


def configured(config: Config) -> Callable[[Named], Updates]:
    """The updates that a run of this config makes."""
    return lambda parameters: updates_of(config, parameters)


class Run:
    """A model, an optimizer state and the step, driven batch by batch on one runtime."""

    def __init__(
        self,
        config: Config,
        runtime: Any,
        *,
        row_loss: RowLoss = next_token_loss,
        updates: Callable[[Named], Updates] = plain_updates,
        count: Count = count_next_tokens,
    ) -> None:
        self.runtime, self.model = runtime, built(config, runtime)
        self.parameters: dict[str, Tensor] = self.model.trainable
        own = updates(self.parameters)
        if isinstance(own.optimizer, Muon):
            own.optimizer.spread = spread_over(runtime)
        self.state: State = {
            name: {slot: runtime.place(t, name=f"{name}/{slot}") for slot, t in slots.items()}
            for name, slots in own.init({n: p.cpu() for n, p in self.parameters.items()}).items()
        }
        self.step = TrainStep(
            self.model.module,
            updates=own,
            sum_over_processes=runtime.sum_over_processes,
            row_loss=row_loss,
            count=count,
            loop=runtime.loop,
        )
        self.program = runtime.program(self._in_place, name="train", held=self._held)

    def _held(self) -> dict[str, Tensor]:
        return {**self.parameters, **flat(self.state)}

    def _in_place(self, batch: Mapping[str, Tensor]) -> Any:
        weights = self.model.weights_with_adapters()
        with with_adapters(weights):
            parameters, state, output = self.step(self.parameters, self.state, batch)
        commit(self.parameters, self.state, new=(parameters, state))
        self.model.keep_weights(weights)
        return output

    def losses(self, batches: list[dict[str, Tensor]]) -> list[float]:
        """Train on the batches in order; the loss of each."""
        outputs = [self.program(self.runtime.put(batch, rows_dim=1)) for batch in batches]
        return [float(output.loss.cpu()) for output in outputs]
