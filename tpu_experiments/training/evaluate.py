"""Held-out loss with exact token weighting: sums on the device, one read at the end.

Accuracy and bits per byte (metrics/held_out.py) come out of the same program; a trainer with a loss of its own has the
loss alone.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from tpu_experiments.data.batches import Batch as HostBatch
from tpu_experiments.data.tokens.widths import Widths
from tpu_experiments.metrics.held_out import measures
from tpu_experiments.models.dropout import NOISE
from tpu_experiments.models.forward import target_weights
from tpu_experiments.models.scoring import TokenScores
from tpu_experiments.runtime.base import Runtime
from tpu_experiments.training.step import ROW_TENSORS, RowLoss

TEXT = "text"
"""Name of the tensor that says which tokens stand for text."""
MORE_MEASURES = ("accuracy", "bits_per_byte")


@dataclass(frozen=True)
class Evaluation:
    """Held-out results: mean loss in nats per supervised token, over all sources and for each."""

    loss: float
    num_tokens: int
    sources: dict[str, float]
    measures: dict[str, float] = field(default_factory=dict)
    """`MORE_MEASURES` over all sources; what cannot be told is left out."""
    source_measures: dict[str, dict[str, float]] = field(default_factory=dict)
    """The same of each source."""

    @property
    def perplexity(self) -> float:
        """Return exp(loss); infinity where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


class Evaluator:
    """Compute held-out results with one program of one shape.

    The last batch is padded with rows of zero weight.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        runtime: Runtime,
        row_loss: RowLoss,
        parameters: Mapping[str, Tensor],
        token_scores: TokenScores | None = None,
        widths: Widths | None = None,
    ) -> None:
        """`token_scores` has the loss of `row_loss` and more; without it there is the loss alone."""
        self.module, self.runtime, self.row_loss, self.parameters = module, runtime, row_loss, parameters
        self.token_scores, self.widths = token_scores, widths
        self.program = runtime.program(self.sums, name="evaluate", held=lambda: parameters)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Return the names of the program's inputs, (rows, T) int32 each."""
        return ROW_TENSORS if self.token_scores is None else (*ROW_TENSORS, TEXT)

    def run(self, batches: Mapping[str, Iterable[HostBatch]]) -> Evaluation:
        """Evaluate every source's batches; all processes take part."""
        self.module.eval()
        queued: dict[str, list[Tensor]] = {}
        num_bytes: dict[str, int] = {}
        for source, source_batches in batches.items():
            queued[source], num_bytes[source] = [], 0
            for batch in source_batches:
                queued[source].append(self.program(self._send(batch)))
                num_bytes[source] += self._bytes(batch)
        self.module.train()
        totals = {source: torch.stack([s.cpu() for s in sums]).double().sum(0) for source, sums in queued.items()}
        overall = torch.stack(list(totals.values())).sum(0)
        losses = {source: float(t[0] / t[1]) for source, t in totals.items() if t[1] > 0}
        return Evaluation(
            float(overall[0] / overall[1]),
            int(overall[1]),
            losses,
            _more(overall, num_bytes=sum(num_bytes.values())),
            {source: _more(totals[source], num_bytes=num_bytes[source]) for source in losses},
        )

    def sums_of(self, batch: HostBatch) -> tuple[float, float]:
        """Return loss sum in nats and supervised tokens of one batch; all processes take part."""
        self.module.eval()
        sums = self.program(self._send(batch))
        self.module.train()
        loss, tokens = sums.cpu().tolist()[:2]
        return loss, tokens

    def _send(self, batch: HostBatch) -> dict[str, Tensor]:
        rows = batch.slice_process(*self.runtime.share)
        tensors = host_tensors(rows)
        if self.token_scores is not None:
            is_text = rows.segments_GT > 0 if self.widths is None else self.widths.stands_for_text(rows.ids_GT)
            tensors[TEXT] = torch.from_numpy(is_text.astype(np.int32))
        return self.runtime.put(tensors, rows_dim=0)

    def _bytes(self, batch: HostBatch) -> int:
        """Return the bytes of the predicted text; 0 where the tokenizer has no known widths."""
        if self.widths is None:
            return 0
        return int(self.widths.of(batch.ids_GT)[batch.learn_GT > 0].sum())

    def sums(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the sums of one batch over all processes; the compiled program.

        Loss in nats and supervised tokens, shape (2,); with `token_scores` also hits, and the loss of tokens that are
        text, shape (4,).
        """
        with torch.no_grad():
            if self.token_scores is None:
                sums_R, weights_R = self.row_loss(self.module, self.parameters, batch)
                return torch.stack(self.runtime.sum_over_processes([sums_R.sum(), weights_R.sum()]))
            found = self.token_scores(self.module, self.parameters, batch)
            weights_RT = target_weights(batch)[1]
            text_RT = torch.roll(batch[TEXT], -1, dims=1)
            more = [(found.hits_RT * weights_RT).sum(), (found.losses_RT * weights_RT * text_RT).sum()]
            return torch.stack(self.runtime.sum_over_processes([found.sums_R.sum(), found.weights_R.sum(), *more]))


def _more(sums: Tensor, *, num_bytes: int) -> dict[str, float]:
    """Compute `MORE_MEASURES` from the program's sums."""
    if len(sums) == 2:
        return {}
    nats, tokens, hits, text_nats = sums.tolist()
    found = measures(np.array([[tokens, num_bytes, nats, text_nats, hits]]))
    return {name: float(found[name][0]) for name in MORE_MEASURES if np.isfinite(found[name][0])}


def host_tensors(batch: HostBatch) -> dict[str, Tensor]:
    """Return `ids`, `learn`, `positions` and `segments`, (rows, T) int32 each.

    `noise` (rows,) is added where the batch has it.
    """
    tensors = {
        "ids": torch.from_numpy(batch.ids_GT),
        "learn": torch.from_numpy(batch.learn_GT),
        "positions": torch.from_numpy(batch.positions_GT),
        "segments": torch.from_numpy(batch.segments_GT),
    }
    return tensors if batch.noise_G is None else tensors | {NOISE: torch.from_numpy(batch.noise_G)}
