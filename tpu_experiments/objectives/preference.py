"""Objectives of preferences: a pair's chosen answer over its rejected one (DPO, arXiv 2305.18290, and its relatives).

A pair is two segments of a row, the odd one chosen and the even one behind it rejected; a row may hold several, and no
segment sees another. `learn` marks the answers' tokens. With p the log-probability of an answer, L its tokens, r = p
minus the reference's p, and d = r of the chosen answer minus r of the rejected one, the loss of a pair is

    sigmoid       -log s(beta d), or with e = label_smoothing -(1 - e) log s(beta d) - e log s(-beta d)
    robust        (-(1 - e) log s(beta d) + e log s(-beta d)) / (1 - 2 e)                         (arXiv 2403.00409)
    hinge         max(0, 1 - beta d)                                                              (arXiv 2305.10425)
    ipo           (r / L of chosen - r / L of rejected - 1 / (2 beta))^2                          (arXiv 2310.12036)
    sigmoid_norm  -log s(beta (r / L of chosen - r / L of rejected))
    simpo         -log s(beta (p / L of chosen - p / L of rejected - gamma_beta_ratio))           (arXiv 2405.14734)
    orpo          -beta log s(log odds of chosen - log odds of rejected), odds of exp(p / L)      (arXiv 2403.07691)

and, times `sft_weight` (of orpo plus 1), the mean -log p of the chosen answers' tokens. Pairs count, not tokens.
`kl`, the sum of r over the number of the answers' tokens, estimates KL(model || reference) per token as if the model
had written the answers; it is below 0 where they became less likely.
Legend: R rows, T tokens, P places of a row for pairs, S = 2 P for segments, K sums.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.masking import num_pairs
from tpu_experiments.config.objectives.preference import WITHOUT_REFERENCE, PreferenceConfig
from tpu_experiments.config.schema import Config
from tpu_experiments.models.passes.forward import target_weights
from tpu_experiments.objectives.base import REFERENCE, Column, Computing, Objective, Rows, Summary
from tpu_experiments.objectives.next_token import next_token_losses

SUMS = (
    *("loss", "pairs", "sft_loss", "chosen_tokens", "rejected_tokens", "rewards_chosen", "rewards_rejected"),
    *("preferred", "logps_chosen", "logps_rejected", "likelier"),
)
"""Sums over held-out rows. `preferred` counts the pairs whose chosen answer has the higher reward, `likelier` those
whose chosen answer has the higher log-probability; a tie counts half."""
LARGEST_MEAN = -1e-6
"""Mean log-probabilities of `orpo` are at most this: the odds of a sure answer are infinite."""


class Pairs(NamedTuple):
    """Pairs of R rows, each in its place; empty places have a weight of 0 and mean nothing."""

    logps_RP2: Tensor
    """Log-probability of the chosen and of the rejected answer by the model."""
    reference_RP2: Tensor
    """The same by the reference; 0 of losses without one."""
    lengths_RP2: Tensor
    """Tokens of the answers, float32, at least 1."""
    weights_RP: Tensor
    """1 where a place has a pair, float32."""
    settings: Mapping[str, Tensor] = {}
    """Numbers of the loss that rows carry, (R, 1) each (`PreferenceConfig.inputs`); the objective's own for others."""


class Preference(Objective):
    """Mean loss of pairs by the formulas above.

    Args:
        loss: name of the formula.
        beta: None is 0.1, of `simpo` 2.
        label_smoothing: share of pairs assumed to be the wrong way round.
        gamma_beta_ratio: margin of `simpo` over beta.
        sft_weight: factor of the mean -log p of the chosen answers' tokens, which is added.
    """

    has_perplexity = False
    metrics_of_card = (("rewards/accuracies", "accuracy", "accuracy of pairs"),)
    words_of_evaluation = (
        "accuracy: the share of pairs whose chosen answer has the higher reward; by log-probability: the higher "
        "log-probability; a tie counts half"
    )
    columns_of_evaluation = (
        ("loss", "loss"),
        ("rewards/accuracies", "accuracy"),
        ("rewards/margins", "margin"),
        ("logps/accuracies", "by log-probability"),
        ("kl", "KL"),
    )

    def __init__(
        self,
        *,
        loss: str = "sigmoid",
        beta: float | None = None,
        label_smoothing: float = 0.0,
        gamma_beta_ratio: float = 0.5,
        sft_weight: float = 0.0,
        computing: Computing | None = None,
    ) -> None:
        config = PreferenceConfig(
            loss=loss,
            beta=beta,
            label_smoothing=label_smoothing,
            gamma_beta_ratio=gamma_beta_ratio,
            sft_weight=sft_weight,
        )
        self.loss, self.settings = loss, config.inputs()
        self.beta = self.settings["beta"]
        self.sft_weight = self.settings.get("sft_weight", 0.0)
        self.has_reference = loss not in WITHOUT_REFERENCE
        self.computing = computing or Computing()

    @classmethod
    def require_fit(cls, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        """Require answers alone to be learnt, and rows that their reference can be told of."""
        for name, stage in config.curriculum.stages.items():
            if stage.learn == "all":
                raise ConfigError(
                    f"curriculum.stages.{name}.learn=all with objective={config.objective.name}; the log-probability "
                    "of an answer is compared, not that of its prompt; use learn=answers."
                )
        if config.loader.order == "written" and config.objective.reads_reference():
            raise ConfigError(
                f"loader.order=written with objective={config.objective.name}; the reference of a row is found by its "
                "number, which written epochs do not keep; use loader.order=permutation."
            )

    @classmethod
    def words_of_results(cls, config: Config, num_predictions: int, *, num_tokens: int) -> str:
        """Return the number of pairs and what they were compared with."""
        against = "the model as it started" if config.objective.reads_reference() else "no reference"
        return (
            f"Over {num_predictions:,} pairs, whose answers have {num_tokens:,} tokens and were not trained on, "
            f"against {against}."
        )

    # ---- training -------------------------------------------------------------------------------------------

    def count(self, rows: Rows) -> Tensor:
        """Return the number of pairs; with a part for the chosen answers' tokens, their number too, (2,)."""
        lengths_RP2, weights_RP = lengths_of(rows)
        return torch.stack(self._parts(weights_RP, lengths_RP2[..., 0] * weights_RP)).sum((1, 2)).squeeze(0)

    def row_loss(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """Return loss sum and number of pairs of every row, (R,) each; with a part for tokens (R, 2) each."""
        sums, counts, _ = self.reported_loss(module, parameters, rows)
        return sums, counts

    def reported_loss(
        self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `row_loss` returns and the sums of `SUMS` of every row, (R, K)."""
        pairs = self.pairs(module, parameters, rows)
        weights_RP, (chosen_RP, _) = pairs.weights_RP, pairs.lengths_RP2.unbind(-1)
        weight = self.number(pairs, "sft_weight") if self.sft_weight else 0.0
        nll_RP = -weight * pairs.logps_RP2[..., 0]
        losses = self._parts(self.losses(pairs) * weights_RP, nll_RP * weights_RP)
        counts = self._parts(weights_RP, chosen_RP * weights_RP)
        with torch.no_grad():
            report_RK = torch.stack([(values * weights_RP).sum(1) for values in self.columns(pairs)], -1)
        return torch.stack(losses, -1).sum(1).squeeze(-1), torch.stack(counts, -1).sum(1).squeeze(-1), report_RK

    def _parts(self, of_pairs: Tensor, of_tokens: Tensor) -> list[Tensor]:
        return [of_pairs, of_tokens] if self.sft_weight else [of_pairs]

    def pairs(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Pairs:
        """Return the pairs of the rows with their log-probabilities."""
        losses_RT, weights_RT = next_token_losses(module, parameters, rows, computing=self.computing)
        lengths_RP2, weights_RP = lengths_of(rows)
        reference_RP2 = torch.zeros_like(lengths_RP2)
        if self.has_reference:
            reference_RP2 = by_segment(rows["segments"], rows[REFERENCE.name]).unflatten(1, (-1, 2))
        logps_RP2 = by_segment(rows["segments"], -losses_RT * weights_RT).unflatten(1, (-1, 2))
        settings = {name: rows[name][:, None] for name in self.settings if name in rows}
        return Pairs(logps_RP2, reference_RP2, lengths_RP2, weights_RP, settings)

    def number(self, pairs: Pairs, name: str) -> Tensor:
        """Return a number of the loss, of shape (R, 1)."""
        if name in pairs.settings:
            return pairs.settings[name]
        return torch.full_like(pairs.weights_RP[..., :1], self.settings[name])

    def losses(self, pairs: Pairs) -> Tensor:
        """Return the loss of every pair without that of tokens, (R, P)."""
        beta = self.number(pairs, "beta")
        ratios_RP2 = pairs.logps_RP2 - pairs.reference_RP2
        chosen_RP, rejected_RP = ratios_RP2.unbind(-1)
        margin_RP = beta * (chosen_RP - rejected_RP)
        mean_chosen_RP, mean_rejected_RP = (ratios_RP2 / pairs.lengths_RP2).unbind(-1)
        match self.loss:
            case "sigmoid":
                smoothing = self.number(pairs, "label_smoothing")
                return -(1 - smoothing) * F.logsigmoid(margin_RP) - smoothing * F.logsigmoid(-margin_RP)
            case "robust":
                smoothing = self.number(pairs, "label_smoothing")
                both_RP = (1 - smoothing) * F.logsigmoid(margin_RP) - smoothing * F.logsigmoid(-margin_RP)
                return -both_RP / (1 - 2 * smoothing)
            case "hinge":
                return torch.relu(1 - margin_RP)
            case "ipo":
                beta = torch.where(beta > 0, beta, 1.0)  # rows of padding have 0
                return (mean_chosen_RP - mean_rejected_RP - 1 / (2 * beta)) ** 2
            case "sigmoid_norm":
                return -F.logsigmoid(beta * (mean_chosen_RP - mean_rejected_RP))
            case "simpo":
                margin_RP = mean_chosen_RP - mean_rejected_RP - self.number(pairs, "gamma_beta_ratio")
                return -F.logsigmoid(beta * margin_RP)
        # Empty places have a mean of 0, whose odds are infinite.
        odds = (_log_odds(torch.where(pairs.weights_RP > 0, m, -1.0)) for m in (mean_chosen_RP, mean_rejected_RP))
        chosen_RP, rejected_RP = odds
        return -beta * F.logsigmoid(chosen_RP - rejected_RP)

    def rewards(self, pairs: Pairs) -> Tensor:
        """Return what the loss compares, of chosen and rejected answers (R, P, 2): beta r, or beta p / L."""
        values_RP2 = pairs.logps_RP2 - pairs.reference_RP2
        beta_R11 = self.number(pairs, "beta")[..., None]
        return beta_R11 * (values_RP2 if self.has_reference else values_RP2 / pairs.lengths_RP2)

    # ---- the reference and held-out rows --------------------------------------------------------------------

    def reference_values(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Tensor:
        """Return the log-probability of every segment's answer (R, S), without a gradient."""
        with torch.no_grad():
            losses_RT, weights_RT = next_token_losses(module, parameters, rows, computing=self.computing)
            return by_segment(rows["segments"], -losses_RT * weights_RT)

    def sums(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Tensor:
        """Return the sums of `SUMS` over the rows, (K,)."""
        with torch.no_grad():
            pairs = self.pairs(module, parameters, rows)
            return torch.stack([(values_RP * pairs.weights_RP).sum() for values_RP in self.columns(pairs)])

    def columns(self, pairs: Pairs) -> list[Tensor]:
        """Return what `SUMS` are the sums of, (R, P) each."""
        rewards_RP2, logps_RP2, lengths_RP2 = self.rewards(pairs), pairs.logps_RP2, pairs.lengths_RP2
        return [
            self.losses(pairs),
            torch.ones_like(pairs.weights_RP),
            -logps_RP2[..., 0],
            *lengths_RP2.unbind(-1),
            *rewards_RP2.unbind(-1),
            chosen_is_higher(rewards_RP2),
            *logps_RP2.unbind(-1),
            chosen_is_higher(logps_RP2),
        ]

    def summary(self, sums: Sequence[float]) -> Summary:
        """Return loss and measures of held-out rows."""
        return summary_of(self, sums, num=sums[SUMS.index("pairs")])

    def measures(self, sums: Sequence[Any]) -> dict[str, Any]:
        """Return loss and, as means over pairs, rewards, their margin and accuracy, log-probabilities and lengths."""
        own = dict(zip(SUMS, sums, strict=True))
        num = own["pairs"]
        chosen, rejected = own["rewards_chosen"] / num, own["rewards_rejected"] / num
        tokens_loss = own["sft_loss"] / own["chosen_tokens"]
        found = {
            "loss": own["loss"] / num + self.sft_weight * tokens_loss,
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": own["preferred"] / num,
            "logps/chosen": own["logps_chosen"] / num,
            "logps/rejected": own["logps_rejected"] / num,
            "logps/accuracies": own["likelier"] / num,
            "chosen_loss": tokens_loss,
            "chosen_tokens": own["chosen_tokens"] / num,
            "rejected_tokens": own["rejected_tokens"] / num,
        }
        if self.has_reference:
            tokens = own["chosen_tokens"] + own["rejected_tokens"]
            found["kl"] = (own["rewards_chosen"] + own["rewards_rejected"]) / (self.beta * tokens)
        return found

    def document_sums(self, values_NS: Column, reference_NS: Column, lengths_NS: Column) -> Column:
        """Return the sums of `SUMS` of every pair, (N, P, K)."""
        each = (torch.from_numpy(given).unflatten(1, (-1, 2)) for given in (values_NS, reference_NS, lengths_NS))
        logps, reference, lengths = each
        reference = reference if self.has_reference else torch.zeros_like(reference)
        weights = (lengths.amin(-1) > 0).double()
        pairs = Pairs(logps, reference, lengths.clamp(min=1), weights, settings={})
        found: Column = torch.stack(self.columns(pairs), -1).numpy()
        return found


def summary_of(objective: Objective, sums: Sequence[float], *, num: float) -> Summary:
    """Return loss and measures of `num` held-out pairs by an objective's `measures`; no loss where there are none."""
    if not num:
        return Summary(math.nan, 0, {})
    found = objective.measures(sums)
    return Summary(found.pop("loss"), round(num), found)


def by_segment(segments_RT: Tensor, values_RT: Tensor, *, num: int | None = None) -> Tensor:
    """Return the sum of the tokens' values of segments 1, 2, ... of every row, (R, S).

    Args:
        num: S; by default twice the places for pairs.
    """
    num = 2 * num_pairs(segments_RT.shape[1]) if num is None else num
    number_S = torch.arange(1, num + 1, dtype=torch.int32, device=segments_RT.device)
    return torch.where(segments_RT[:, None] == number_S[:, None], values_RT[:, None], 0.0).sum(-1)


def chosen_is_higher(values_RP2: Tensor) -> Tensor:
    """Return 1 where the chosen answer has the higher value, 0.5 where they are equal, else 0, (R, P)."""
    return (1 + torch.sign(values_RP2[..., 0] - values_RP2[..., 1])) / 2


def lengths_of(rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the answers' tokens (R, P, 2), at least 1, and 1 where a place has two answers (R, P)."""
    lengths_RP2 = by_segment(rows["segments"], target_weights(rows)[1]).unflatten(1, (-1, 2))
    return lengths_RP2.clamp(min=1.0), (lengths_RP2.amin(-1) > 0).to(torch.float32)


def _log_odds(means: Tensor) -> Tensor:
    """Return log(q / (1 - q)) of probabilities with these logarithms."""
    means = means.clamp(max=LARGEST_MEAN)
    # log(1 - exp(x)) in float32, as Maechler, "Accurately computing log(1 - exp(-|a|))", 2012.
    rest = torch.where(means > -math.log(2), torch.log(-torch.expm1(means)), torch.log1p(-torch.exp(means)))
    return means - rest
