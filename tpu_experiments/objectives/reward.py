"""The objective of reward models: an answer's score, higher for the chosen one of a pair (arXiv 2203.02155).

Pairs lie in rows as for other preferences (objectives/preference.py). The score of an answer is the logit of a linear
layer at the last token of its conversation, that of transformers' `ForSequenceClassification` of one label. With scores
c and r of a pair's chosen and rejected answer and w = `center_rewards_coefficient` its loss is

    -log sigmoid(c - r - m) + w (c + r)^2

m is the margin of the pair, which the rows carry with `objective.margin`; else 0.
Legend: R rows, P places of a row for pairs, S = 2 P for segments, K sums, D documents.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpu_experiments.config.masking import num_pairs
from tpu_experiments.config.schema import Config
from tpu_experiments.data.steps.pairs import MARGIN
from tpu_experiments.metrics.flops import FlopsPerToken, scored_flops
from tpu_experiments.models.families.classification import last_scores
from tpu_experiments.objectives.base import Column, Computing, Objective, Rows, Summary
from tpu_experiments.objectives.preference import by_segment, chosen_is_higher, lengths_of, summary_of

SUMS = (*("loss", "pairs", "rewards_chosen", "rewards_rejected", "preferred", "chosen_tokens", "rejected_tokens"),)
"""Sums over held-out pairs. `preferred` counts those whose chosen answer has the higher score; a tie counts half."""


class Reward(Objective):
    """Mean loss of pairs by the formula above."""

    has_perplexity = False
    head = "sequence_classification"
    metrics_of_card = (("rewards/accuracies", "accuracy", "accuracy of pairs"),)
    words_of_evaluation = "accuracy: the share of pairs whose chosen answer has the higher score; a tie counts half"
    columns_of_evaluation = (
        ("loss", "loss"),
        ("rewards/accuracies", "accuracy"),
        ("rewards/margins", "margin"),
        ("rewards/chosen", "chosen"),
        ("rewards/rejected", "rejected"),
    )

    def __init__(
        self, *, center_rewards_coefficient: float = 0.0, margin: bool = False, computing: Computing | None = None
    ) -> None:
        self.center, self.has_margin = center_rewards_coefficient, margin

    @classmethod
    def flops(cls, config: Config, arch: Any, *, seq_len: int) -> FlopsPerToken:
        """Return the FLOPs of a decoder with a scalar head."""
        return scored_flops(config, arch, seq_len=seq_len)

    @classmethod
    def words_of_results(cls, config: Config, num_predictions: int, *, num_tokens: int) -> str:
        """Return the number of pairs."""
        return (
            f"Over {num_predictions:,} pairs, whose answers have {num_tokens:,} tokens and were not trained on; "
            "rewards are the scores of their answers."
        )

    @classmethod
    def lines_of_use(cls, config: Config) -> tuple[list[str], str]:
        """Return how to score an answer."""
        return [
            'turns = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}]',
            'inputs = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)',
            "score = model(**inputs).logits[0, 0]",
        ], "The higher of two answers' scores is that of the better one; a score alone has no unit."

    # ---- training -------------------------------------------------------------------------------------------

    def count(self, rows: Rows) -> Tensor:
        """Return the number of pairs."""
        return lengths_of(rows)[1].sum()

    def row_loss(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """Return loss sum and number of pairs of every row, (R,) each."""
        sums, counts, _ = self.reported_loss(module, parameters, rows)
        return sums, counts

    def reported_loss(
        self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `row_loss` returns and the sums of `SUMS` of every row, (R, K)."""
        columns, weights_RP = self._columns_of_rows(module, parameters, rows)
        sums_RK = torch.stack([(values_RP * weights_RP).sum(1) for values_RP in columns], -1)
        return sums_RK[:, 0], weights_RP.sum(1), sums_RK.detach()

    def _columns_of_rows(
        self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows
    ) -> tuple[list[Tensor], Tensor]:
        lengths_RP2, weights_RP = lengths_of(rows)
        scores_RP2 = last_scores(module, parameters, rows, num=_num_segments(rows)).unflatten(1, (-1, 2))
        margins_RP = self._margins(rows).unflatten(1, (-1, 2)).sum(-1) if self.has_margin else None
        return self.columns(scores_RP2, lengths_RP2, margins_RP), weights_RP

    def _margins(self, rows: Rows) -> Tensor:
        """Return the margins of pairs (R, S) at their second segments, 0 at others."""
        return by_segment(rows["segments"], rows[MARGIN.name])

    def columns(self, scores_RP2: Tensor, lengths_RP2: Tensor, margins_RP: Tensor | None = None) -> list[Tensor]:
        """Return what `SUMS` are the sums of, (R, P) each."""
        return [
            self.losses(scores_RP2, margins_RP),
            torch.ones_like(scores_RP2[..., 0]),
            *scores_RP2.unbind(-1),
            chosen_is_higher(scores_RP2),
            *lengths_RP2.unbind(-1),
        ]

    def losses(self, scores_RP2: Tensor, margins_RP: Tensor | None = None) -> Tensor:
        """Return the loss of every pair, (R, P)."""
        chosen_RP, rejected_RP = scores_RP2.unbind(-1)
        differences_RP = chosen_RP - rejected_RP
        losses_RP = -F.logsigmoid(differences_RP if margins_RP is None else differences_RP - margins_RP)
        return losses_RP + self.center * (chosen_RP + rejected_RP) ** 2 if self.center else losses_RP

    # ---- held-out rows --------------------------------------------------------------------------------------

    def reference_values(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Tensor:
        """Return the score of every segment (R, S), without a gradient; with margins (R, S, 2), they behind it."""
        with torch.no_grad():
            scores_RS = last_scores(module, parameters, rows, num=_num_segments(rows))
            return torch.stack([scores_RS, self._margins(rows)], -1) if self.has_margin else scores_RS

    def sums(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Tensor:
        """Return the sums of `SUMS` over the rows, (K,)."""
        with torch.no_grad():
            return self.reported_loss(module, parameters, rows)[2].sum(0)

    def summary(self, sums: Sequence[float]) -> Summary:
        """Return loss and measures of held-out rows."""
        return summary_of(self, sums, num=sums[SUMS.index("pairs")])

    def measures(self, sums: Sequence[Any]) -> dict[str, Any]:
        """Return loss and, as means over pairs, scores, their margin and accuracy, and the answers' lengths."""
        own = dict(zip(SUMS, sums, strict=True))
        num = own["pairs"]
        chosen, rejected = own["rewards_chosen"] / num, own["rewards_rejected"] / num
        return {
            "loss": own["loss"] / num,
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": own["preferred"] / num,
            "chosen_tokens": own["chosen_tokens"] / num,
            "rejected_tokens": own["rejected_tokens"] / num,
        }

    def document_sums(self, values_NS: Column, reference_NS: Column, lengths_NS: Column) -> Column:
        """Return the sums of `SUMS` of every pair, (N, P, K); scores are compared with no reference."""
        values, lengths = (torch.from_numpy(each).unflatten(1, (-1, 2)) for each in (values_NS, lengths_NS))
        scores, margins = (values[..., 0], values[..., 1].sum(-1)) if self.has_margin else (values, None)
        found: Column = torch.stack(self.columns(scores, lengths, margins), -1).numpy()
        return found


def _num_segments(rows: Rows) -> int:
    return 2 * num_pairs(rows["ids"].shape[1])
