"""Held-out loss with exact token weighting: sums on the device, one read at the end."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tpu_experiments.data.batches import Batch as HostBatch
from tpu_experiments.models.dropout import NOISE
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.training.step import RowLoss


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats per supervised token, over all sources and for each."""

    loss: float
    num_tokens: int
    sources: dict[str, float]

    @property
    def perplexity(self) -> float:
        """exp(loss); infinity where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


class Evaluator:
    """One program of one shape; the last batch is padded with rows of zero weight."""

    def __init__(
        self, module: nn.Module, *, runtime: Runtime, row_loss: RowLoss, parameters: Mapping[str, Tensor]
    ) -> None:
        self.module, self.runtime, self.row_loss, self.parameters = module, runtime, row_loss, parameters
        self.program = runtime.program(self.sums, name="evaluate", held=lambda: parameters)

    def run(self, batches: Mapping[str, Iterable[HostBatch]]) -> Evaluation:
        """Evaluate every source's batches; all processes take part."""
        self.module.eval()
        queued = {
            source: [self.program(self._send(batch)) for batch in source_batches]
            for source, source_batches in batches.items()
        }
        self.module.train()
        totals = {source: torch.stack([s.cpu() for s in sums]).double().sum(0) for source, sums in queued.items()}
        overall = torch.stack(list(totals.values())).sum(0)
        losses = {source: float(t[0] / t[1]) for source, t in totals.items() if t[1] > 0}
        return Evaluation(float(overall[0] / overall[1]), int(overall[1]), losses)

    def sums_of(self, batch: HostBatch) -> tuple[float, float]:
        """Loss sum in nats and supervised tokens of one batch; all processes take part."""
        self.module.eval()
        sums = self.program(self._send(batch))
        self.module.train()
        loss, tokens = sums.cpu().tolist()
        return loss, tokens

    def _send(self, batch: HostBatch) -> dict[str, Tensor]:
        rows = batch.slice_process(self.runtime.rank, self.runtime.world_size)
        return self.runtime.put(host_tensors(rows), rows_dim=0)

    def sums(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The program: loss sum in nats and supervised tokens of one batch over all processes, shape (2,)."""
        with torch.no_grad():
            sums_R, weights_R = self.row_loss(self.module, self.parameters, batch)
            return torch.stack(self.runtime.sum_over_processes([sums_R.sum(), weights_R.sum()]))


def host_tensors(batch: HostBatch) -> dict[str, Tensor]:
    """`ids`, `learn`, `positions`, `segments`, each (rows, T) int32, and `noise` (rows,) where the batch has it."""
    tensors = {
        "ids": torch.from_numpy(batch.ids_GT),
        "learn": torch.from_numpy(batch.learn_GT),
        "positions": torch.from_numpy(batch.positions_GT),
        "segments": torch.from_numpy(batch.segments_GT),
    }
    return tensors if batch.noise_G is None else tensors | {NOISE: torch.from_numpy(batch.noise_G)}
