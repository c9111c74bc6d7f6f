"""KTO: answers that are labelled good or bad, one by one (arXiv 2402.01306).

An answer is a segment of a row, a good one an odd segment and a bad one an even segment, so that a preference pair is a
good answer and a bad one. `learn` marks the answers' tokens. With p the log-probability of an answer, r = p minus the
reference's p, and s the logistic function, its loss is

    good  desirable_weight (1 - s(beta (r - z)))
    bad   undesirable_weight (1 - s(beta (z - r)))

and a loss is a mean over answers, whatever their weights. z is the mean of r over the mismatched answers of the same
row, at least 0, without a gradient: every prompt of the row with the answer of the example before it, the first with
the last one's. Of pairs it is the answer of the pair before it on the same side, so that no prompt meets an answer of
its own. These are the row's own tokens in another order, so they fill one row, of which a second forward pass computes
the log-probabilities. A row with a single example has no mismatched answer, and a z of 0.

TRL takes the mean over the examples of a micro-batch on all devices, so its loss depends on their number. Here it is
that of a row: rows, and with them losses and gradients, are the same for every split into micro-batches and devices.
Legend: R rows, T tokens, S segments, K sums.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.masking import num_examples
from tpu_experiments.config.schema import Config
from tpu_experiments.metrics.flops import FlopsPerToken, decoder_flops
from tpu_experiments.models.passes.forward import target_weights
from tpu_experiments.objectives.base import REFERENCE, Column, Computing, Objective, Rows, Summary
from tpu_experiments.objectives.next_token import next_token_losses
from tpu_experiments.objectives.preference import Preference, by_segment

SUMS = (
    *("loss", "good", "bad", "rewards_good", "rewards_bad", "logps_good", "logps_bad"),
    *("right", "kl", "good_tokens", "bad_tokens"),
)
"""Sums over held-out rows; `right` counts the answers on their label's side of z, one at z half."""
_POSITIVE = [10 ** (power / 8) for power in range(-24, 17)]
EDGES = (*(-each for each in reversed(_POSITIVE)), *_POSITIVE)
"""Borders of rewards, 0.001 to 100 on either side of 0, eight a decade, between which task=evaluate counts answers for
the area under the curve; two rewards between the same borders count as a tie."""


class Answers(NamedTuple):
    """Answers of R rows, each at the place of its segment, (R, S); empty places have a weight of 0."""

    logps_RS: Tensor
    """Log-probability by the model."""
    reference_RS: Tensor
    """The same by the reference."""
    kl_RS: Tensor
    """z of the answer's row."""
    lengths_RS: Tensor
    """Tokens of the answers, float32."""
    weights_RS: Tensor
    """1 where there is an answer, float32."""


class Kto(Objective):
    """Mean loss of answers by the formulas above."""

    num_references = 2
    has_perplexity = False
    metrics_of_card = (("rewards/accuracies", "accuracy", "accuracy of answers"),)
    words_of_evaluation = (
        "accuracy: the share of answers whose log-ratio to the reference is on their label's side of KL, the mean one "
        "of the mismatched answers in the same row; AUC: how often a good answer has a higher reward than a bad one"
    )
    columns_of_evaluation = (
        ("loss", "loss"),
        ("rewards/accuracies", "accuracy"),
        ("rewards/auc", "AUC"),
        ("rewards/chosen", "reward of good"),
        ("rewards/rejected", "of bad"),
        ("kl", "KL"),
    )

    def __init__(
        self,
        *,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        computing: Computing | None = None,
    ) -> None:
        self.beta, self.computing = beta, computing or Computing()
        self.desirable_weight, self.undesirable_weight = desirable_weight, undesirable_weight

    @classmethod
    def require_fit(cls, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        """Require what pairs require: answers alone to be learnt, and rows that their reference can be told of."""
        Preference.require_fit(config, tokenizer)

    @classmethod
    def words_of_results(cls, config: Config, num_predictions: int, *, num_tokens: int) -> str:
        """Return the number of answers and what they were compared with."""
        return (
            f"Over {num_predictions:,} answers of {num_tokens:,} tokens that were not trained on, against the model "
            "as it started."
        )

    @classmethod
    def flops(cls, config: Config, arch: Any, *, seq_len: int) -> FlopsPerToken:
        """Return the FLOPs per token of a decoder that also reads the mismatched answers."""
        return decoder_flops(config, arch, seq_len=seq_len, forwards=2)

    def count(self, rows: Rows) -> Tensor:
        """Return the number of answers."""
        return (_by_segment(rows, target_weights(rows)[1]) > 0).sum().to(torch.float32)

    def row_loss(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """Return loss sum and number of answers of every row, (R,) each."""
        answers = self.answers(module, parameters, rows)
        return (self.losses(answers) * answers.weights_RS).sum(1), answers.weights_RS.sum(1)

    def answers(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Answers:
        """Return the answers of the rows with their log-probabilities."""
        logps_RS, lengths_RS = self._logps(module, parameters, rows)
        weights_RS = (lengths_RS > 0).to(torch.float32)
        reference_RT, is_learnt_RT = rows[REFERENCE.name], rows["learn"] > 0
        with torch.no_grad():
            other = mismatched(rows)
            ratios_RS = self._logps(module, parameters, other)[0] - _by_segment(rows, reference_RT * ~is_learnt_RT)
            has_RS = (_by_segment(other, (other["learn"] > 0).to(torch.float32)) > 0).to(torch.float32)
        own_RS = _by_segment(rows, reference_RT * is_learnt_RT)
        return Answers(logps_RS, own_RS, _kl(ratios_RS, has_RS), lengths_RS, weights_RS)

    def _logps(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """Return log-probability and number of tokens of every segment's answer, (R, S) each."""
        losses_RT, weights_RT = next_token_losses(module, parameters, rows, computing=self.computing)
        return _by_segment(rows, -losses_RT * weights_RT), _by_segment(rows, weights_RT)

    def losses(self, answers: Answers) -> Tensor:
        """Return the weighted loss of every answer, (R, S)."""
        distance_RS = self.beta * (answers.logps_RS - answers.reference_RS - answers.kl_RS)
        is_good_S = _is_good(distance_RS)
        good_RS, bad_RS = torch.sigmoid(-distance_RS), torch.sigmoid(distance_RS)
        return torch.where(is_good_S, self.desirable_weight * good_RS, self.undesirable_weight * bad_RS)

    # ---- the reference and held-out rows --------------------------------------------------------------------

    def reference_values(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Tensor:
        """Return the log-probability of every segment's answer and of its prompt's mismatched one, (R, S, 2)."""
        with torch.no_grad():
            each = [self._logps(module, parameters, found)[0] for found in (rows, mismatched(rows))]
            return torch.stack(each, -1)

    def sums(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Tensor:
        """Return the sums of `SUMS` over the rows, (11,)."""
        with torch.no_grad():
            return torch.stack([values_RS.sum() for values_RS in self.columns(self.answers(module, parameters, rows))])

    def columns(self, answers: Answers) -> list[Tensor]:
        """Return what `SUMS` are the sums of, (R, S) each."""
        rewards_RS = self.beta * (answers.logps_RS - answers.reference_RS)
        good_RS = answers.weights_RS * _is_good(rewards_RS)
        bad_RS = answers.weights_RS - good_RS
        return [
            self.losses(answers) * answers.weights_RS,
            *(good_RS, bad_RS, rewards_RS * good_RS, rewards_RS * bad_RS),
            *(answers.logps_RS * good_RS, answers.logps_RS * bad_RS),
            self._is_right(answers) * answers.weights_RS,
            answers.kl_RS * answers.weights_RS,
            *(answers.lengths_RS * good_RS, answers.lengths_RS * bad_RS),
        ]

    def summary(self, sums: Sequence[float]) -> Summary:
        """Return loss, accuracy and z, and means over good and over bad answers; figures of no answer are left out."""
        found = {name: float(value) for name, value in self.measures([*np.array(sums)]).items()}
        num = round(sum(sums[SUMS.index(side)] for side in ("good", "bad")))
        return Summary(found.pop("loss"), num, {name: value for name, value in found.items() if math.isfinite(value)})

    def measures(self, sums: Sequence[Any]) -> dict[str, Any]:
        """Return loss and measures from arrays of sums; figures of no answer are NaN.

        The sums of `document_sums` also tell `rewards/auc`.
        """
        own, more = dict(zip(SUMS, sums[: len(SUMS)], strict=True)), np.array(sums[len(SUMS) :])
        with np.errstate(divide="ignore", invalid="ignore"):
            num = own["good"] + own["bad"]
            found = {"loss": own["loss"] / num, "rewards/accuracies": own["right"] / num, "kl": own["kl"] / num}
            for side, name in (("good", "chosen"), ("bad", "rejected")):
                found |= {f"{what}/{name}": own[f"{what}_{side}"] / own[side] for what in ("rewards", "logps")}
                found[f"{name}_tokens"] = own[f"{side}_tokens"] / own[side]
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
            if len(more):
                good, bad = np.split(more, 2)
                found["rewards/auc"] = (good * (bad.cumsum(0) - bad / 2)).sum(0) / (good.sum(0) * bad.sum(0))
        return found

    def document_sums(self, values_NS: Column, reference_NS: Column, lengths_NS: Column) -> Column:
        """Return the sums of `SUMS`, and the good and the bad answers between `EDGES`, of every pair, (N, P, K)."""
        values, reference, lengths = (torch.from_numpy(each) for each in (values_NS, reference_NS, lengths_NS))
        weights_RS = (lengths > 0).double()
        (logps_RS, other_RS), (reference_RS, before_RS) = values.unbind(-1), reference.unbind(-1)
        # Every answer of a row meets another prompt, or none does.
        has_RS = weights_RS * ((other_RS != 0) | (before_RS != 0)).any(1, keepdim=True)
        answers = Answers(logps_RS, reference_RS, _kl(other_RS - before_RS, has_RS), lengths, weights_RS)
        number_RS = torch.bucketize(self.beta * (logps_RS - reference_RS), torch.tensor(EDGES, dtype=logps_RS.dtype))
        between_RSB = nn.functional.one_hot(number_RS, len(EDGES) + 1) * weights_RS[..., None]
        good_RSB = between_RSB * _is_good(weights_RS)[:, None]
        each = torch.cat([torch.stack(self.columns(answers), -1), good_RSB, between_RSB - good_RSB], -1)
        found: Column = each.unflatten(1, (-1, 2)).sum(2).numpy()
        return found

    def _is_right(self, answers: Answers) -> Tensor:
        above_RS = answers.logps_RS - answers.reference_RS - answers.kl_RS
        return (1 + torch.sign(torch.where(_is_good(above_RS), above_RS, -above_RS))) / 2


def _kl(ratios_RS: Tensor, has_RS: Tensor) -> Tensor:
    """Return z of every row, the mean of the mismatched answers' log-ratios and at least 0, for its segments (R, S)."""
    mean_R1 = (ratios_RS * has_RS).sum(1, keepdim=True) / has_RS.sum(1, keepdim=True).clamp(min=1)
    return mean_R1.clamp(min=0).expand_as(ratios_RS)


def num_segments(rows: Rows) -> int:
    """Return S, the places of a row for segments."""
    return 2 * num_examples(rows["ids"].shape[1])


def mismatched(rows: Rows) -> dict[str, Tensor]:
    """Return the rows with each prompt before the answer of the example before it; padding where there is none.

    A prompt is a segment up to its first learnt token, and keeps its segment's number. Shapes are those of the rows.
    """
    segments_RT, positions_RT, learn_RT = rows["segments"], rows["positions"], rows["learn"]
    length = segments_RT.shape[1]
    device, count = segments_RT.device, num_segments(rows)
    number_S = torch.arange(1, count + 1, dtype=torch.int32, device=device)
    index_T = torch.arange(length, dtype=torch.int32, device=device)
    is_own_RST = segments_RT[:, None] == number_S[:, None]
    is_learnt_RT = (learn_RT > 0) & (positions_RT > 0)
    length_RS = is_own_RST.sum(-1, dtype=torch.int32)
    start_RS = length_RS.cumsum(1, dtype=torch.int32) - length_RS
    first_RS = torch.where(is_own_RST & is_learnt_RT[:, None], positions_RT[:, None], length).amin(-1).to(torch.int32)
    has_RS = first_RS < length
    prompt_RS = torch.where(has_RS, first_RS, 0)
    # The answer of an example goes to the next one: of pairs to the same side of the next pair.
    rank_RS = has_RS.cumsum(1, dtype=torch.int32)
    num_R1 = rank_RS[:, -1:]
    step_R1 = 1 + has_RS.unflatten(1, (-1, 2)).all(-1).any(1, keepdim=True).to(torch.int32)
    from_RS = torch.remainder(rank_RS - 1 - step_R1, num_R1.clamp(min=1)) + 1
    is_from_RSS = has_RS[:, None] & (rank_RS[:, None] == from_RS[..., None])
    source_RS = torch.where(is_from_RSS, number_S - 1, 0).sum(-1, dtype=torch.int32)
    answer_RS = _at(length_RS - prompt_RS, source_RS)
    new_RS = torch.where(has_RS & (num_R1 > step_R1), prompt_RS + answer_RS, 0)
    end_RS = new_RS.cumsum(1, dtype=torch.int32)
    segment_RT = (index_T >= end_RS[..., None]).sum(1, dtype=torch.int32)
    is_inside_RT = segment_RT < count
    segment_RT = segment_RT.clamp(max=count - 1)
    position_RT = index_T - _at(end_RS - new_RS, segment_RT)
    source_RT, prompt_RT = _at(source_RS, segment_RT), _at(prompt_RS, segment_RT)
    is_prompt_RT = position_RT < prompt_RT
    answer_RT = _at(start_RS + prompt_RS, source_RT) + position_RT - prompt_RT
    taken_RT = torch.where(is_prompt_RT, _at(start_RS, segment_RT) + position_RT, answer_RT)
    taken_RT = torch.where(is_inside_RT, taken_RT, 0)
    return {
        **rows,
        "ids": torch.where(is_inside_RT, _at(rows["ids"], taken_RT), 0),
        "learn": torch.where(is_inside_RT & ~is_prompt_RT, _at(learn_RT, taken_RT), 0),
        "positions": torch.where(is_inside_RT, position_RT, 0),
        "segments": torch.where(is_inside_RT, segment_RT + 1, 0),
    }


def _at(values: Tensor, index: Tensor) -> Tensor:
    """Return the values of every row at these columns."""
    return torch.gather(values, 1, index.long())


def _by_segment(rows: Rows, values_RT: Tensor) -> Tensor:
    return by_segment(rows["segments"], values_RT, num=num_segments(rows))


def _is_good(values_RS: Tensor) -> Tensor:
    """Return which places are those of good answers, (S,)."""
    return torch.arange(values_RS.shape[1], dtype=torch.int32, device=values_RS.device) % 2 == 0
