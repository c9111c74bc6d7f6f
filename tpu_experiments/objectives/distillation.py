"""The objective of a student: a teacher's predictions of every token, stored beforehand (data/teacher.py).

The loss of a token is (1 - alpha) times a divergence between both models' predictions of it plus alpha times its
cross-entropy; formulas are those of models/passes/distillation.py. Tokens to be learnt count, as in next_token.py.
Legend: R rows, T tokens, E entries of the teacher, K sums.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.schema import Config
from tpu_experiments.data.teacher import IDS, LOGPS
from tpu_experiments.models.passes.distillation import Comparison, Taught, chunked_losses, losses_of
from tpu_experiments.models.passes.forward import (
    has_plain_head,
    hidden_of,
    logits_of,
    soft_cap_of,
    target_weights,
)
from tpu_experiments.models.passes.loss import Scores
from tpu_experiments.objectives.base import Computing, Objective, Rows, Summary
from tpu_experiments.objectives.next_token import count_next_tokens, next_token_scores
from tpu_experiments.objectives.preference import summary_of

SUMS = ("loss", "tokens", "ce", "kl")


class Distillation(Objective):
    """Divergence from stored predictions of a teacher, a mean over the tokens to be learnt.

    Args:
        top_k: entries of the teacher that rows carry.
        temperature: divides the student's logits, as it did the teacher's.
        beta: 0 forward KL, 1 reverse KL, between them the generalised Jensen-Shannon divergence.
        rest: what becomes of the mass outside the entries, `bucket` or `renormalised`.
        alpha: share of the tokens' own cross-entropy.
    """

    has_perplexity = False
    metrics_of_card = (("ce", "loss", "cross-entropy, nats per token"), ("kl", "kl", "KL from the teacher"))

    def __init__(
        self,
        *,
        top_k: int = 64,
        temperature: float = 1.0,
        beta: float = 0.0,
        rest: str = "bucket",
        alpha: float = 0.0,
        computing: Computing | None = None,
    ) -> None:
        self.comparison = Comparison(temperature, rest, beta if beta in (0, 1) else None)
        self.settings = {"alpha": alpha, "beta": beta}
        self.computing = computing or Computing()

    @classmethod
    def require_fit(cls, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        """Require rows that their teacher can be told of."""
        if config.loader.order == "written":
            raise ConfigError(
                f"loader.order=written with objective={config.objective.name}; the teacher of a row is found by its "
                "number, which written epochs do not keep; use loader.order=permutation."
            )

    @classmethod
    def words_of_results(cls, config: Config, num_predictions: int, *, num_tokens: int) -> str:
        """Return what was compared."""
        return (
            f"Over {num_predictions:,} tokens that were not trained on. The loss is a distance from a teacher's "
            "predictions of them; ce is their own cross-entropy in nats, kl the forward KL from the teacher."
        )

    def count(self, rows: Rows) -> Tensor:
        """Return the number of tokens to be learnt."""
        return count_next_tokens(rows)

    def row_loss(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """Return loss sum in nats and number of learnt tokens of every row."""
        sums_R, counts_R, _ = self.reported_loss(module, parameters, rows)
        return sums_R, counts_R

    def reported_loss(
        self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `row_loss` returns and the sums of `SUMS` of every row, (R, K)."""
        targets_RT, weights_RT = target_weights(rows)
        alpha_RT = self._number("alpha", rows) * weights_RT
        beta_RT = (self._number("beta", rows) + torch.zeros_like(weights_RT)).detach()
        taught = Taught(targets_RT, rows[IDS], rows[LOGPS], weights_RT - alpha_RT, alpha_RT, beta_RT)
        if self.computing.chunk_tokens is None or not has_plain_head(module):
            found = losses_of(logits_of(module, parameters, rows).float(), taught, self.comparison)
            sums_R, tokens_RT, kl_RT = found.weighted(taught).sum(1), found.tokens_BT, found.kl_BT
        else:
            hidden_RTH, head_VH = hidden_of(module, parameters, rows)
            terms = self.computing.terms(hidden_RTH, soft_cap=soft_cap_of(module))
            sums_R, tokens_RT, kl_RT = chunked_losses(hidden_RTH, head_VH, taught, terms, self.comparison)
        counts_R = weights_RT.sum(1)
        with torch.no_grad():
            means = ((each * weights_RT).sum(1) for each in (tokens_RT, kl_RT))
            report_RK = torch.stack([sums_R.detach(), counts_R, *means], -1)
        return sums_R, counts_R, report_RK

    def _number(self, name: str, rows: Rows) -> Tensor:
        """Return a number of the loss, (R, 1): that of every row, or the objective's own."""
        if name in rows:
            return rows[name][:, None]
        return torch.full_like(rows["ids"][:, :1], self.settings[name], dtype=torch.float32)

    def scores(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Scores:
        """Return loss in nats and hit of every token, as the prediction of the next token has them."""
        return next_token_scores(module, parameters, rows, computing=self.computing)

    def sums(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Tensor:
        """Return the sums of `SUMS` over the rows, (K,)."""
        with torch.no_grad():
            return self.reported_loss(module, parameters, rows)[2].sum(0)

    def summary(self, sums: Sequence[float]) -> Summary:
        """Return loss, cross-entropy and KL of held-out tokens."""
        return summary_of(self, sums, num=sums[SUMS.index("tokens")])

    def measures(self, sums: Sequence[Any]) -> dict[str, Any]:
        """Return means over tokens: the loss, the cross-entropy of the tokens and the forward KL."""
        own = dict(zip(SUMS, sums, strict=True))
        return {name: own[name] / own["tokens"] for name in ("loss", "ce", "kl")}
