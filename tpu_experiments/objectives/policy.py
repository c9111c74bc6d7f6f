"""Policy gradients on groups of the model's own answers (GRPO, arXiv 2402.03300, and its relatives).

A row is a prompt and one answer, whose tokens `learn` marks; an answer that was cut off may have none. With p the
log-probability of a token, A the advantage of its answer, r = exp(p - old), c = r held to [1 - epsilon,
1 + epsilon_high], k = start - p, and w = min(exp(old - sampler), max_weight), without a gradient, a token's loss is

    -w min(r A, c A) + beta (exp(k) - k - 1)                     (the last as in http://joschu.net/blog/kl-approx.html)

With `ratio=sequence` p - old is the answer's mean (GSPO, arXiv 2507.18071). The rows' sums are divided by

    grpo     the answers, after each sum was divided by the answer's tokens
    bnpo     the tokens of the global batch
    dapo     the answers times the mean length of an answer of the rollout             (arXiv 2503.14476)
    dr_grpo  the answers times the longest length                                      (arXiv 2503.20783)

`rloo` (arXiv 2402.14740) has one ratio for an answer, of the sum of p - old, no w, its KL in the reward, and is divided
by the answers. What a row counts for comes with it (`DIVISOR`), so that the quotient is exact whatever the
micro-batches and devices. Token arrays have a value at the token itself.
Legend: N answers, R rows, T tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tpu_experiments.config.objectives.policy import LEAVES_ONE_OUT
from tpu_experiments.data.rows import Array
from tpu_experiments.models.passes.loss import Scores
from tpu_experiments.objectives.base import Computing, Objective, Rows
from tpu_experiments.objectives.next_token import next_token_losses, next_token_scores

ADVANTAGE = Array("advantage", "float32", per="row")
DIVISOR = Array("divisor", "float32", per="row")
"""What a row counts for in the number that the loss is divided by; `divisors` has it."""
OLD = Array("old_logps", "float32", per="token")
"""Log-probabilities by the model when the rollout began; not read with `old=own`."""
SAMPLER = Array("sampler_logps", "float32", per="token")
"""Log-probabilities by what drew the tokens; NaN where it did not say."""
START = Array("start_logps", "float32", per="token")
"""Log-probabilities by the model as the run started; read with `beta` alone."""
SUMS = ("answers", "tokens", "ratio", "clip_ratio/low", "clip_ratio/high", "kl", "weight", "entropy")
"""Sums over rows that steps report; all but the first count tokens. Entropies are estimates, -log p of what was drawn.
"""


class Policy(Objective):
    """Loss of answers by their advantages, by the formulas above.

    Args:
        scale: read by what computes the advantages (rewards/advantages.py), as are the attributes `leaves_one_out` and
            `reward_beta`, the factor of an answer's KL that its reward is lowered by.
    """

    sampled = (ADVANTAGE, DIVISOR, OLD, SAMPLER, START)
    has_scores = True
    has_perplexity = False

    def __init__(
        self,
        *,
        loss: str = "dapo",
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        ratio: str = "token",
        scale: str = "group",
        max_weight: float = 3.0,
        old: str = "rows",
        computing: Computing | None = None,
    ) -> None:
        self.loss, self.ratio = loss, ratio
        self.low, self.high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
        self.is_of_answers = self.leaves_one_out = loss in LEAVES_ONE_OUT
        self.scale, self.reward_beta = scale, beta if self.is_of_answers else 0.0
        self.beta = 0.0 if self.is_of_answers else beta
        self.max_weight, self.has_own_old = max_weight, old == "own"
        self.computing = computing or Computing()

    def count(self, rows: Rows) -> Tensor:
        """Return the sum of what the rows count for, shape ()."""
        return rows[DIVISOR.name].sum()

    def row_loss(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the loss sum of every row and what it counts for, (R,) each."""
        return self._of_rows(module, parameters, rows)["loss"], rows[DIVISOR.name]

    def logps(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Tensor:
        """Return the log-probability of every learnt token at the token itself, 0 elsewhere, (R, T), for a rollout."""
        with torch.no_grad():
            losses_RT, learnt_RT = next_token_losses(module, parameters, rows, computing=self.computing)
            return torch.roll(torch.where(learnt_RT > 0, -losses_RT, 0.0), 1, dims=1)

    def divisors(self, tokens_N: NDArray[np.int64], *, max_new_tokens: int) -> NDArray[np.float32]:
        """Return what each answer of a rollout counts for; see the function of this name."""
        return divisors(self.loss, tokens_N, max_new_tokens=max_new_tokens)

    def reported_loss(
        self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `row_loss` returns and the sums of `SUMS` of every row, (R, 8)."""
        found = self._of_rows(module, parameters, rows)
        report_RK = torch.stack([found[name].detach() for name in SUMS], -1)
        return found["loss"], rows[DIVISOR.name], report_RK

    def measures(self, sums: Sequence[Any]) -> dict[str, Any]:
        """Return means over tokens of ratio, clipped shares, KL, weight and entropy, and over answers of tokens."""
        own = dict(zip(SUMS, sums, strict=True))
        tokens = max(own["tokens"], 1.0)
        measures = {name: own[name] / tokens for name in SUMS[2:]}
        measures["learnt_tokens"] = own["tokens"] / max(own["answers"], 1.0)
        if not self.beta:
            del measures["kl"]
        return measures

    def scores(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Scores:
        """Return loss in nats and hit of every token of held-out rows, which are answers of the data."""
        return next_token_scores(module, parameters, rows, computing=self.computing)

    def _of_rows(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> dict[str, Tensor]:
        """Return the loss and the values of `SUMS` of every row, (R,) each."""
        losses_RT, learnt_RT = next_token_losses(module, parameters, rows, computing=self.computing)
        is_row_R = (rows["segments"].amax(1) > 0).to(torch.float32)
        tokens_R = learnt_RT.sum(1)
        # Zero outside answers: whatever stands there must not become an infinite ratio times 0.
        logps_RT = torch.where(learnt_RT > 0, -losses_RT, 0.0)
        own_RT = logps_RT.detach()
        old_RT = own_RT if self.has_own_old else _before(rows, OLD, learnt_RT)
        log_ratio_RT = logps_RT - old_RT
        if self.is_of_answers:
            log_ratio_RT = log_ratio_RT.sum(1, keepdim=True)
        elif self.ratio == "sequence":
            log_ratio_RT = log_ratio_RT.sum(1, keepdim=True) / tokens_R.clamp(min=1.0)[:, None]
        ratio_RT = torch.exp(log_ratio_RT)
        advantage_R1 = rows[ADVANTAGE.name][:, None]
        held_RT = ratio_RT.clamp(self.low, self.high)
        each_RT = -torch.minimum(ratio_RT * advantage_R1, held_RT * advantage_R1)
        weight_RT, kl_RT = learnt_RT, torch.zeros_like(learnt_RT)
        if self.is_of_answers:
            loss_R = each_RT[:, 0] * is_row_R
        else:
            sampler_RT = _before(rows, SAMPLER, learnt_RT)
            unknown_RT = sampler_RT != sampler_RT
            weight_RT = torch.exp(torch.where(unknown_RT, 0.0, old_RT - sampler_RT)).clamp(max=self.max_weight)
            each_RT = each_RT * weight_RT
            if self.beta:
                more_RT = _before(rows, START, learnt_RT) - logps_RT
                kl_RT = torch.exp(more_RT) - more_RT - 1
                each_RT = each_RT + self.beta * kl_RT
            loss_R = (each_RT * learnt_RT).sum(1)
            if self.loss == "grpo":
                loss_R = loss_R / tokens_R.clamp(min=1.0)
        clipped_low_RT = ((ratio_RT < self.low) & (advantage_R1 < 0)).to(torch.float32)
        clipped_high_RT = ((ratio_RT > self.high) & (advantage_R1 > 0)).to(torch.float32)
        over_tokens = (ratio_RT, clipped_low_RT, clipped_high_RT, kl_RT, weight_RT, -own_RT)
        of_tokens = [(values_RT * learnt_RT).sum(1) for values_RT in over_tokens]
        return {"loss": loss_R} | dict(zip(SUMS, (is_row_R, tokens_R, *of_tokens), strict=True))


def _before(rows: Rows, array: Array, learnt_RT: Tensor) -> Tensor:
    """Return an array's values at the positions before their tokens, (R, T); 0 where none is learnt."""
    return torch.where(learnt_RT > 0, torch.roll(rows[array.name], -1, dims=1), 0.0)


def divisors(loss: str, tokens_N: NDArray[np.int64], *, max_new_tokens: int) -> NDArray[np.float32]:
    """Return what each answer of a rollout counts for in the number that the loss is divided by, (N,).

    Args:
        tokens_N: learnt tokens of the answers; 0 of those cut off, where these are not learnt.
    """
    match loss:
        case "bnpo":
            return tokens_N.astype(np.float32)
        case "dapo":
            return np.full(len(tokens_N), tokens_N.mean(), np.float32)
        case "dr_grpo":
            return np.full(len(tokens_N), max_new_tokens, np.float32)
    return np.ones(len(tokens_N), np.float32)
