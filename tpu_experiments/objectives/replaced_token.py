"""Replaced-token detection (ELECTRA, arXiv 2003.10555) as DeBERTa-v3 trains it (arXiv 2111.09543).

A generator predicts masked tokens. Tokens drawn from its predictions take their places, and a discriminator says of
every token of the row whether it is the original one. No gradient passes through the draw, and none of the
discriminator's loss reaches the generator or the embedding that both share (models/replaced_token.py).
Legend: R rows, T tokens, K places of a row for its masked tokens, H hidden, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.objectives.replaced_token import ReplacedTokenConfig
from tpu_experiments.config.schema import Config
from tpu_experiments.metrics.flops import FlopsPerToken, replaced_token_flops
from tpu_experiments.models.parts.dropout import NOISE, token_words
from tpu_experiments.models.parts.float32_gradients import product
from tpu_experiments.models.passes.gumbel import sampled
from tpu_experiments.models.passes.loss import Scores
from tpu_experiments.models.replaced_token import GENERATOR, generator_hidden_of, replaced_logits_of
from tpu_experiments.objectives.base import Column, Computing, Objective, Rows, Summary
from tpu_experiments.objectives.masked import RANDOM, Masked
from tpu_experiments.optim.base import ParameterGroup

DRAWN = RANDOM + 1
"""Site of the draw of a token that takes a masked one's place (objectives/masked.py has the others)."""


SUMS = ("generator_loss", "masked", "hits", "rtd_loss", "tokens", "replaced", "said", "found")
"""Sums over held-out rows: `said` counts the tokens that the discriminator takes for replaced, `found` those of them
that are."""


class Predictions(NamedTuple):
    """What generator and discriminator say of R rows."""

    losses_RK: Tensor
    """Cross-entropy of the generator in nats at every place."""
    hits_RK: Tensor
    """1 where the generator's likeliest token is the original one, float32."""
    taken_RK: Tensor
    """1 at places that hold a masked token, float32; the others count nowhere."""
    logits_RT: Tensor
    """The discriminator's logits: above 0 it takes a token for replaced."""
    replaced_RT: Tensor
    """1 where a token was replaced by another one, float32; a token that was drawn rightly is an original."""
    tokens_RT: Tensor
    """1 at tokens, 0 at padding, float32."""


class ReplacedToken(Objective):
    """Loss of the generator plus `rtd_weight` times that of the discriminator, each a mean over its own predictions.

    Args:
        mask_rate: share of the tokens to be learnt that are masked; all become the mask token. None is special.
        mask_token: stands for a masked token where the tokenizer has no mask token of its own.
        rtd_weight: factor of the discriminator's loss: 50 in ELECTRA, 10 in microsoft/DeBERTa's script.
        temperature: divides the generator's logits before a token is drawn.
        generator_clip_norm: largest norm of the generator's gradient; None is that of `optim.clip_norm`, which the
            discriminator's has.
        generator_rate: the generator's learning rate over the discriminator's.
    """

    draws = True
    reads_draws = True
    causal = False
    takes_tokenizer = True
    has_perplexity = False
    head = "own"
    words_of_evaluation = (
        "loss and accuracy are the discriminator's, of every token but a document's first; precision, recall and "
        "F1 are of finding the replaced tokens; majority: the accuracy of taking every token for an original"
    )

    def __init__(
        self,
        *,
        mask_rate: float = 0.15,
        mask_token: str | None = None,
        rtd_weight: float = 50.0,
        temperature: float = 1.0,
        generator_clip_norm: float | None = None,
        generator_rate: float = 1.0,
        computing: Computing | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.masked = Masked(
            mask_rate=mask_rate, replace_mask=1.0, replace_random=0.0, mask_token=mask_token, tokenizer=tokenizer
        )
        self.rtd_weight, self.temperature = rtd_weight, temperature
        self.generator_clip_norm, self.generator_rate = generator_clip_norm, generator_rate
        self.computing = computing or Computing()

    def parameter_groups(self, names: Sequence[str], *, clip_norm: float | None) -> list[ParameterGroup]:
        """Return the generator's parameters and the discriminator's, as if each had an optimizer of its own."""
        of_generator = tuple(name for name in names if name.startswith(GENERATOR))
        others = tuple(name for name in names if not name.startswith(GENERATOR))
        limit = clip_norm if self.generator_clip_norm is None else self.generator_clip_norm
        return [ParameterGroup(of_generator, limit, self.generator_rate), ParameterGroup(others, clip_norm)]

    @classmethod
    def flops(cls, config: Config, arch: Any, *, seq_len: int) -> FlopsPerToken:
        """Return the FLOPs of generator and discriminator."""
        settings = config.objective
        if not isinstance(settings, ReplacedTokenConfig):
            return super().flops(config, arch, seq_len=seq_len)
        return replaced_token_flops(arch, seq_len=seq_len, masked=settings.mask_rate)

    def count(self, rows: Rows) -> Tensor:
        """Return the numbers of masked tokens and of tokens, (2,)."""
        return torch.stack([self.masked.count(rows), tokens_of(rows).sum()])

    def row_loss(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """Return loss sums in nats and numbers of predictions of every row, (R, 2): generator, discriminator."""
        found = self.predictions(module, parameters, rows)
        losses_RT = F.binary_cross_entropy_with_logits(found.logits_RT, found.replaced_RT, reduction="none")
        sums = [(found.losses_RK * found.taken_RK).sum(1), self.rtd_weight * (losses_RT * found.tokens_RT).sum(1)]
        return torch.stack(sums, -1), torch.stack([found.taken_RK.sum(1), found.tokens_RT.sum(1)], -1)

    def sums(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Tensor:
        """Return the sums of `SUMS` over the rows, (8,)."""
        with torch.no_grad():
            found = self.predictions(module, parameters, rows)
            losses_RT = F.binary_cross_entropy_with_logits(found.logits_RT, found.replaced_RT, reduction="none")
            said_RT = (found.logits_RT > 0).to(torch.float32) * found.tokens_RT
            each = [
                found.losses_RK * found.taken_RK,
                found.taken_RK,
                found.hits_RK * found.taken_RK,
                losses_RT * found.tokens_RT,
                found.tokens_RT,
                found.replaced_RT,
                said_RT,
                said_RT * found.replaced_RT,
            ]
            return torch.stack([tensor.sum() for tensor in each])

    def document_scores(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Scores:
        """Return the discriminator's loss in nats of every token and what it is taken for, at the position before it.

        The latter, in the place of hits, is 1 for a token that is taken for replaced, plus 2 for one that is.
        """
        with torch.no_grad():
            found = self.predictions(module, parameters, rows)
            losses_RT = F.binary_cross_entropy_with_logits(found.logits_RT, found.replaced_RT, reduction="none")
            said_RT = (found.logits_RT > 0).to(torch.float32)
            weighed = [
                losses_RT * found.tokens_RT,
                (said_RT + 2 * found.replaced_RT) * found.tokens_RT,
                found.tokens_RT,
            ]
            spread = [torch.roll(each_RT, -1, dims=1) for each_RT in weighed]
        return Scores(weighed[0].sum(1), found.tokens_RT.sum(1), *spread)

    def read_hits(self, hits_L: Column, predicted_L: Column) -> tuple[Column, dict[str, list[Column]]]:
        """Return where the discriminator is right, and what `detection` is measured by (metrics/held_out.py)."""
        replaced_L, said_L = predicted_L * (hits_L >= 2), predicted_L * (hits_L % 2)
        columns_L = [predicted_L, replaced_L, said_L, replaced_L * said_L]
        return predicted_L * (replaced_L == said_L), {"detection": columns_L}

    def summary(self, sums: Sequence[float]) -> Summary:
        """Return the loss of both models together, and the measures of each.

        `rtd_accuracy` is to be held against `rtd_majority`, the accuracy of taking every token for an original, and
        `rtd_loss` against `rtd_rate_loss`, that of giving every token the same probability, the rate of replacement.
        `rtd_f1` is that of finding the replaced ones, 0 for the first rule.
        """
        own = dict(zip(SUMS, sums, strict=True))
        if not own["tokens"] or not own["masked"]:
            return Summary(math.nan, 0, {})
        generator, discriminator = own["generator_loss"] / own["masked"], own["rtd_loss"] / own["tokens"]
        wrong = own["replaced"] + own["said"] - 2 * own["found"]
        rate = own["replaced"] / own["tokens"]
        measures = {
            "generator_loss": generator,
            "generator_accuracy": own["hits"] / own["masked"],
            "rtd_loss": discriminator,
            "rtd_rate_loss": -sum(p * math.log(p) for p in (rate, 1 - rate) if p > 0),
            "rtd_accuracy": 1 - wrong / own["tokens"],
            "rtd_majority": 1 - rate,
        }
        if own["replaced"] + own["said"]:
            measures["rtd_f1"] = 2 * own["found"] / (own["replaced"] + own["said"])
        return Summary(generator + self.rtd_weight * discriminator, int(own["tokens"]), measures)

    def predictions(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Predictions:
        """Return the predictions of both models; the discriminator reads what the generator has drawn."""
        masking, ids_RT = self.masked.masking(rows), rows["ids"]
        hidden_RTH, head_VH, bias_V = generator_hidden_of(module, parameters, masking.rows["ids"], rows)
        hidden_RKH = torch.bmm(masking.picks_RKT.to(hidden_RTH.dtype), hidden_RTH)
        # Of a quarter of the tokens, so logits are held at once: the draw needs them too.
        logits_RKV = product(hidden_RKH, head_VH, bias_V).float()
        losses = F.cross_entropy(logits_RKV.flatten(0, 1), masking.targets_RK.flatten().long(), reduction="none")
        with torch.no_grad():
            words_RT = token_words(rows[NOISE], length=ids_RT.shape[1], site=DRAWN)
            is_pick_RKT = masking.picks_RKT > 0
            words_RK = torch.where(is_pick_RKT, words_RT[:, None], 0).sum(-1, dtype=torch.int32)
            drawn_RK = sampled(logits_RKV / self.temperature, words_RK).to(ids_RT.dtype)
            drawn_RT = torch.where(is_pick_RKT, drawn_RK[..., None], 0).sum(1, dtype=torch.int32)
            given_RT = torch.where(is_pick_RKT.any(1), drawn_RT, ids_RT)
            own_RK = torch.gather(logits_RKV, -1, masking.targets_RK[..., None].long())[..., 0]
            hits_RK = (logits_RKV.amax(-1) <= own_RK).to(torch.float32)
        logits_RT = replaced_logits_of(module, parameters, given_RT, rows)
        replaced_RT = (given_RT != ids_RT).to(torch.float32)
        losses_RK = losses.view_as(hits_RK)
        return Predictions(losses_RK, hits_RK, masking.weights_RK, logits_RT, replaced_RT, tokens_of(rows))


def tokens_of(rows: Rows) -> Tensor:
    """Return 1 at tokens and 0 at padding, (R, T) float32."""
    return (rows["segments"] > 0).to(torch.float32)
