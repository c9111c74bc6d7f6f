"""The objective of decoders: every token from those before it in its document."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpu_experiments.models.adapters.token_rows import trained_rows_of
from tpu_experiments.models.passes.forward import (
    has_plain_head,
    hidden_of,
    logits_of,
    row_losses,
    soft_cap_of,
    target_weights,
)
from tpu_experiments.models.passes.loss import Scores, chunked_row_losses, chunked_scores
from tpu_experiments.models.passes.token_losses import chunked_token_losses
from tpu_experiments.objectives.base import Computing, Objective, Rows

WHOLE = Computing()
"""All logits at once, on the process's own device."""


class NextToken(Objective):
    """Cross-entropy of the next token in nats, over the tokens to be learnt (`learn`).

    Args:
        z_loss: factor of log(Z)^2, which is added to the loss of every token in training (PaLM, arXiv 2204.02311:
            1e-4). Held-out losses are without it.
    """

    has_scores = True

    def __init__(self, *, z_loss: float = 0.0, computing: Computing | None = None) -> None:
        self.z_loss, self.computing = z_loss, computing or Computing()

    def count(self, rows: Rows) -> Tensor:
        """Return the number of tokens to be learnt."""
        return count_next_tokens(rows)

    def row_loss(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """Return loss sum in nats and number of learnt tokens of every row."""
        return next_token_loss(module, parameters, rows, computing=self.computing, z_loss=self.z_loss)

    def scores(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Scores:
        """Return loss in nats and hit of every token."""
        return next_token_scores(module, parameters, rows, computing=self.computing)


def count_next_tokens(rows: Rows) -> Tensor:
    """Return the number of tokens to be learnt, shape ()."""
    return target_weights(rows)[1].sum()


def next_token_loss(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    rows: Rows,
    *,
    computing: Computing = WHOLE,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the next-token cross-entropy sums in nats and the supervised tokens, (R,) each.

    Args:
        computing: with `chunk_tokens=None`, or a head that is more than a matrix product, all logits exist at once.
        z_loss: factor of log(Z)^2, which is added to the loss of every token.
    """
    if computing.chunk_tokens is None or not has_plain_head(module):
        return row_losses(logits_of(module, parameters, rows), rows, z_loss=z_loss)
    hidden_RTH, head_VH = hidden_of(module, parameters, rows)
    rows_N = trained_rows_of(module)
    terms = computing.terms(hidden_RTH, soft_cap=soft_cap_of(module), z_loss=z_loss, rows_N=rows_N)
    return chunked_row_losses(hidden_RTH, head_VH, rows, terms)


def next_token_losses(
    module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows, *, computing: Computing = WHOLE
) -> tuple[Tensor, Tensor]:
    """Return -log p of the token after each position in nats, and its weight, (R, T) float32 each.

    Losses are there whatever the weight, which is that of `target_weights`, and may be differentiated once, by any
    gradient. `computing` is that of `next_token_loss`.
    """
    targets_RT, weights_RT = target_weights(rows)
    if computing.chunk_tokens is None or not has_plain_head(module):
        logits_RTV = logits_of(module, parameters, rows).float()
        losses = F.cross_entropy(logits_RTV.flatten(0, 1), targets_RT.flatten().long(), reduction="none")
        return losses.view_as(weights_RT), weights_RT
    hidden_RTH, head_VH = hidden_of(module, parameters, rows)
    terms = computing.terms(hidden_RTH, soft_cap=soft_cap_of(module), rows_N=trained_rows_of(module))
    return chunked_token_losses(hidden_RTH, head_VH, targets_RT, terms=terms), weights_RT


def next_token_scores(
    module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows, *, computing: Computing = WHOLE
) -> Scores:
    """Return the scores of next tokens, without a gradient; arguments are those of `next_token_loss`."""
    with torch.no_grad():
        if computing.chunk_tokens is None or not has_plain_head(module):
            return _scores_from_logits(logits_of(module, parameters, rows), rows)
        hidden_RTH, head_VH = hidden_of(module, parameters, rows)
        targets_RT, weights_RT = target_weights(rows)
        terms = computing.terms(hidden_RTH, soft_cap=soft_cap_of(module))
        sums_R, losses_RT, hits_RT = chunked_scores(hidden_RTH, head_VH, targets_RT, weights_RT, terms)
        return Scores(sums_R, weights_RT.sum(1), losses_RT, hits_RT)


def _scores_from_logits(logits_RTV: Tensor, rows: Rows) -> Scores:
    targets_RT, weights_RT = target_weights(rows)
    logits_RTV = logits_RTV.float()
    losses = F.cross_entropy(logits_RTV.flatten(0, 1), targets_RT.flatten().long(), reduction="none")
    losses_RT = losses.view_as(weights_RT)
    own_RT = torch.gather(logits_RTV, -1, targets_RT[..., None].long())[..., 0]
    hits_RT = (logits_RTV.amax(-1) <= own_RT).to(torch.float32)
    return Scores((losses_RT * weights_RT).sum(1), weights_RT.sum(1), losses_RT, hits_RT)
