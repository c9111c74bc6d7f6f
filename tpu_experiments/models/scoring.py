"""Scores of every token of some rows: its loss, and whether it was the likeliest."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpu_experiments.models.forward import hidden_of, logits_of, target_weights
from tpu_experiments.models.head import has_plain_head, soft_cap_of
from tpu_experiments.models.loss import chunked_token_scores
from tpu_experiments.runtime.layout import Lay, as_it_lies
from tpu_experiments.runtime.loop import Loop, python_loop


class Scores(NamedTuple):
    """Scores of R rows of T tokens, float32."""

    sums_R: Tensor
    """Weighted loss sums, nats; bit for bit those of `next_token_loss` (training/step.py)."""
    weights_R: Tensor
    losses_RT: Tensor
    """-log p of the token after each position, nats, whatever its weight."""
    hits_RT: Tensor
    """1 where no other token was likelier."""


TokenScores = Callable[[nn.Module, Mapping[str, Tensor], Mapping[str, Tensor]], Scores]
"""(module, parameters, rows (R, T)) to their scores."""


def next_token_scores(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    rows: Mapping[str, Tensor],
    *,
    chunk_tokens: int | None = None,
    num_shards: int = 1,
    loop: Loop = python_loop,
    lay: Lay = as_it_lies,
) -> Scores:
    """Return the scores of next tokens, without a gradient.

    Arguments are those of `next_token_loss` (training/step.py).
    """
    with torch.no_grad():
        if chunk_tokens is None or not has_plain_head(module):
            return _of_logits(logits_of(module, parameters, rows), rows)
        hidden_BTH, head_VH = hidden_of(module, parameters, rows)
        positions = max(1, chunk_tokens * num_shards // hidden_BTH.shape[0])
        cap = soft_cap_of(module)
        return Scores(
            *chunked_token_scores(
                hidden_BTH, head_VH, rows, chunk_positions=positions, loop=loop, lay=lay, soft_cap=cap
            )
        )


def _of_logits(logits_RTV: Tensor, rows: Mapping[str, Tensor]) -> Scores:
    targets_RT, weights_RT = target_weights(rows)
    logits_RTV = logits_RTV.float()
    losses = F.cross_entropy(logits_RTV.flatten(0, 1), targets_RT.flatten().long(), reduction="none")
    losses_RT = losses.view_as(weights_RT)
    own_RT = torch.gather(logits_RTV, -1, targets_RT[..., None].long())[..., 0]
    hits_RT = (logits_RTV.amax(-1) <= own_RT).to(torch.float32)
    return Scores((losses_RT * weights_RT).sum(1), weights_RT.sum(1), losses_RT, hits_RT)
