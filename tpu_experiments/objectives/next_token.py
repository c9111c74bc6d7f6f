"""The objective of decoders: every token from those before it in its document."""

from collections.abc import Mapping

from torch import Tensor, nn

from tpu_experiments.models.passes.forward import (
    has_plain_head,
    hidden_of,
    logits_of,
    row_losses,
    soft_cap_of,
    target_weights,
)
from tpu_experiments.models.passes.loss import Scores, chunked_row_losses, next_token_scores
from tpu_experiments.objectives.base import Computing, Objective, Rows
from tpu_experiments.runtime.ops import Constrain, Loop, python_loop, unconstrained


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
        return next_token_loss(module, parameters, rows, z_loss=self.z_loss, **self.computing.of_head())

    def scores(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Scores:
        """Return loss in nats and hit of every token."""
        return next_token_scores(module, parameters, rows, **self.computing.of_head())


def count_next_tokens(rows: Rows) -> Tensor:
    """Return the number of tokens to be learnt, shape ()."""
    return target_weights(rows)[1].sum()


def next_token_loss(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    rows: Rows,
    *,
    chunk_tokens: int | None = None,
    num_shards: int = 1,
    loop: Loop = python_loop,
    constrain: Constrain = unconstrained,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the next-token cross-entropy sums in nats and the supervised tokens, (R,) each.

    Args:
        chunk_tokens: tokens per device whose logits exist at once. With None, or a head that is more than a matrix
            product, all logits exist at once.
        num_shards: devices of this process that the rows are split over.
        z_loss: factor of log(Z)^2, which is added to the loss of every token.
    """
    if chunk_tokens is None or not has_plain_head(module):
        return row_losses(logits_of(module, parameters, rows), rows, z_loss=z_loss)
    hidden_BTH, head_VH = hidden_of(module, parameters, rows)
    positions = max(1, chunk_tokens * num_shards // hidden_BTH.shape[0])
    return chunked_row_losses(
        hidden_BTH,
        head_VH,
        rows,
        chunk_positions=positions,
        loop=loop,
        constrain=constrain,
        soft_cap=soft_cap_of(module),
        z_loss=z_loss,
    )
