"""Every token of some rows scored by one program of one shape, on any runtime; the scores come back to the host."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from tpu_experiments.data.batches import Batch
from tpu_experiments.models.scoring import TokenScores
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.runtime.reading import host_copy
from tpu_experiments.training.evaluate import host_tensors

AHEAD = 8
"""Batches that are queued before one is read, so that the device does not wait for the host."""


class Scorer:
    """Score rows with the current values of `parameters`."""

    def __init__(
        self, module: nn.Module, *, runtime: Runtime, token_scores: TokenScores, parameters: Mapping[str, Tensor]
    ) -> None:
        self.module, self.runtime, self.token_scores, self.parameters = module, runtime, token_scores, parameters
        self.program = runtime.program(self.scores, name="score", held=lambda: parameters)

    def run(self, batches: Iterable[Batch]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return losses in nats and hits, (N, T) each, of all rows in order.

        Every process takes part and gets all.
        """
        self.module.eval()
        found: list[NDArray[np.float32]] = []
        queued: list[Tensor] = []
        for batch in batches:
            rows = batch.slice_process(*self.runtime.share)
            queued.append(self.program(self.runtime.put(host_tensors(rows), rows_dim=0)))
            if len(queued) > AHEAD:
                found.append(host_copy(queued.pop(0)).numpy())
        found += [host_copy(scores).numpy() for scores in queued]
        losses, hits = np.concatenate(found, axis=1)
        return losses, hits

    def scores(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return losses and hits of the global batch, (2, G, T); the compiled program.

        Each process adds its rows to zeros.
        """
        rank, world_size = self.runtime.share
        with torch.no_grad():
            found = self.token_scores(self.module, self.parameters, batch)
            both = torch.stack([found.losses_RT, found.hits_RT])
            rows = both.shape[1]
            both = F.pad(both, (0, 0, rank * rows, (world_size - 1 - rank) * rows))
            (summed,) = self.runtime.sum_over_processes([both])
            # Whole on every device: reading a split one takes a program of its own.
            return self.runtime.lay(summed, axes=())
