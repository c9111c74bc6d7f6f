"""Replaced-token detection (ELECTRA, arXiv 2003.10555) as DeBERTa-v3 trains it (arXiv 2111.09543).

A generator predicts masked tokens. Tokens drawn from its predictions take their places, and a discriminator says of
every token of the row whether it is the original one. No gradient passes through the draw, and none of the
discriminator's loss reaches the generator or the embedding that both share (models/replaced_token.py).
Legend: R rows, T tokens, K slots for masked tokens, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tpu_experiments.models.dropout import GOLDEN, hashed
from tpu_experiments.models.float32_gradients import product
from tpu_experiments.models.gumbel import sampled
from tpu_experiments.models.replaced_token import GENERATOR, generator_hidden_of, replaced_logits_of
from tpu_experiments.objectives.base import Computing, Rows, Summary
from tpu_experiments.optim.base import ParameterGroup

MASKS, DRAWS = 0x4D61736B, 0x44726177
"""Sites of a row's random word: which tokens are masked, and which take their places."""


SUMS = ("generator_loss", "masked", "hits", "rtd_loss", "tokens", "replaced", "said", "found")
"""Sums over held-out rows: `said` counts the tokens that the discriminator takes for replaced, `found` those of them
that are."""


class Predictions(NamedTuple):
    """What generator and discriminator say of R rows."""

    losses_RK: Tensor
    """Cross-entropy of the generator in nats at every slot."""
    hits_RK: Tensor
    """1 where the generator's likeliest token is the original one, float32."""
    taken_RK: Tensor
    """1 at slots that hold a masked token, float32; the other slots count nowhere."""
    logits_RT: Tensor
    """The discriminator's logits: above 0 it takes a token for replaced."""
    replaced_RT: Tensor
    """1 where a token was replaced by another one, float32; a token that was drawn rightly is an original."""
    tokens_RT: Tensor
    """1 at tokens, 0 at padding, float32."""


class ReplacedToken:
    """Loss of the generator plus `rtd_weight` times that of the discriminator, each a mean over its own predictions.

    Args:
        tokenizer: has the mask token, and the special tokens, which are never masked.
        mask_token: as set; the tokenizer has it by then.
        mask_rate: share of the tokens to be learnt that are masked; all become the mask token.
        rtd_weight: factor of the discriminator's loss: 50 in ELECTRA, 10 in microsoft/DeBERTa's script.
        temperature: divides the generator's logits before a token is drawn.
        generator_clip_norm: largest norm of the generator's gradient; None is that of `optim.clip_norm`, which the
            discriminator's has.
        generator_rate: the generator's learning rate over the discriminator's.
    """

    draws = True
    causal = False
    reads_tokenizer = True
    has_scores = False
    has_perplexity = False
    head = "own"

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase | None,
        mask_token: str | None = None,
        mask_rate: float = 0.15,
        rtd_weight: float = 50.0,
        temperature: float = 1.0,
        generator_clip_norm: float | None = None,
        generator_rate: float = 1.0,
        computing: Computing | None = None,
    ) -> None:
        self.mask_rate, self.rtd_weight, self.temperature = mask_rate, rtd_weight, temperature
        self.generator_clip_norm, self.generator_rate = generator_clip_norm, generator_rate
        # A plan has no tokenizer, and its programs need none of the values.
        self.mask_id = 0 if tokenizer is None else int(tokenizer.mask_token_id)
        self.special_ids = () if tokenizer is None else tuple(sorted(set(tokenizer.all_special_ids)))
        self.computing = computing or Computing()

    def parameter_groups(self, names: Sequence[str], *, clip_norm: float | None) -> list[ParameterGroup]:
        """Return the generator's parameters and the discriminator's, as if each had an optimizer of its own."""
        of_generator = tuple(name for name in names if name.startswith(GENERATOR))
        others = tuple(name for name in names if not name.startswith(GENERATOR))
        limit = clip_norm if self.generator_clip_norm is None else self.generator_clip_norm
        return [ParameterGroup(of_generator, limit, self.generator_rate), ParameterGroup(others, clip_norm)]

    def slots(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the positions (R, K), int64, at most K of each row's tokens to be masked, and whether each is taken.

        A token is masked where the hash of its row's word and its position is below the rate, so that the number of
        masks varies. K is four standard deviations above its mean over rows that are all learnt; where a row has more,
        in one of 30,000, those with the largest hashes stay as they are. The positions of a row differ, taken or not.
        """
        ids_RT = rows["ids"]
        index_RT = torch.arange(ids_RT.shape[1], dtype=torch.int32, device=ids_RT.device).expand(ids_RT.shape)
        # 24 bits, which float32 holds exactly.
        drawn_RT = (position_words(rows["noise"], index_RT, site=MASKS) & 0xFFFFFF).to(torch.float32) * 2.0**-24
        is_masked_RT = (rows["learn"] > 0) & (rows["segments"] > 0) & (drawn_RT < self.mask_rate)
        for special in self.special_ids:
            is_masked_RT = is_masked_RT & (ids_RT != special)
        found = torch.where(is_masked_RT, drawn_RT, 1.0).topk(
            most_masks(ids_RT.shape[1], self.mask_rate), largest=False
        )
        return found.indices, (found.values < 1).to(torch.float32)

    def count(self, rows: Rows) -> Tensor:
        """Return the numbers of masked tokens and of tokens, (2,)."""
        taken_RK = self.slots(rows)[1]
        return torch.stack([taken_RK.sum(), tokens_of(rows).sum()])

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

    def summary(self, sums: Sequence[float]) -> Summary:
        """Return the loss of both models together, and the measures of each.

        `rtd_accuracy` is to be held against `rtd_majority`, the accuracy of taking every token for an original;
        `rtd_f1` is that of finding the replaced ones, 0 for that rule.
        """
        own = dict(zip(SUMS, sums, strict=True))
        if not own["tokens"] or not own["masked"]:
            return Summary(math.nan, 0, {})
        generator, discriminator = own["generator_loss"] / own["masked"], own["rtd_loss"] / own["tokens"]
        wrong = own["replaced"] + own["said"] - 2 * own["found"]
        measures = {
            "generator_loss": generator,
            "generator_accuracy": own["hits"] / own["masked"],
            "rtd_loss": discriminator,
            "rtd_accuracy": 1 - wrong / own["tokens"],
            "rtd_majority": 1 - own["replaced"] / own["tokens"],
        }
        if own["replaced"] + own["said"]:
            measures["rtd_f1"] = 2 * own["found"] / (own["replaced"] + own["said"])
        return Summary(generator + self.rtd_weight * discriminator, int(own["masked"]) + int(own["tokens"]), measures)

    def predictions(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Predictions:
        """Return the predictions of both models; the discriminator reads what the generator has drawn."""
        slots_RK, taken_RK = self.slots(rows)
        ids_RT = rows["ids"]
        originals_RK = torch.gather(ids_RT, 1, slots_RK)
        masks_RK = torch.where(taken_RK > 0, torch.full_like(originals_RK, self.mask_id), originals_RK)
        masked_RT = ids_RT.scatter(1, slots_RK, masks_RK)
        hidden_RTH, head_VH, bias_V = generator_hidden_of(module, parameters, masked_RT, rows)
        hidden_RKH = torch.gather(hidden_RTH, 1, slots_RK[..., None].expand(-1, -1, hidden_RTH.shape[-1]))
        # Of a tenth to a fifth of the tokens, so logits are held at once.
        logits_RKV = product(hidden_RKH, head_VH, bias_V).float()
        losses = F.cross_entropy(logits_RKV.flatten(0, 1), originals_RK.flatten().long(), reduction="none")
        with torch.no_grad():
            words_RK = position_words(rows["noise"], slots_RK, site=DRAWS)
            drawn_RK = sampled(logits_RKV / self.temperature, words_RK).to(ids_RT.dtype)
            given_RT = ids_RT.scatter(1, slots_RK, torch.where(taken_RK > 0, drawn_RK, originals_RK))
            own_RK = torch.gather(logits_RKV, -1, originals_RK[..., None].long())[..., 0]
            hits_RK = (logits_RKV.amax(-1) <= own_RK).to(torch.float32)
        logits_RT = replaced_logits_of(module, parameters, given_RT, rows)
        replaced_RT = (given_RT != ids_RT).to(torch.float32)
        return Predictions(losses.view_as(hits_RK), hits_RK, taken_RK, logits_RT, replaced_RT, tokens_of(rows))


def tokens_of(rows: Rows) -> Tensor:
    """Return 1 at tokens and 0 at padding, (R, T) float32."""
    return (rows["segments"] > 0).to(torch.float32)


def most_masks(length: int, rate: float) -> int:
    """Return the slots for masked tokens in a row: four standard deviations above the mean number."""
    return min(length, math.ceil(length * rate + 4 * math.sqrt(length * rate * (1 - rate))))


def position_words(words_R: Tensor, index_RK: Tensor, *, site: int) -> Tensor:
    """Return a random word for positions of every row, int32 as the positions (R, K).

    Args:
        site: sets uses of the same row's word apart.
    """
    own_R = hashed(words_R ^ site)
    return hashed(own_R[:, None] ^ (index_RK.to(torch.int32) * GOLDEN))
