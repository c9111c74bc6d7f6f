"""The objective of encoders: hidden tokens from the rest of their document (BERT, arXiv 1810.04805).

Legend: R rows, T tokens, K places of a row for its masked tokens, H hidden, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.masking import MOST_PIECES, num_places
from tpu_experiments.config.objectives.masked import MaskedConfig
from tpu_experiments.config.schema import Config
from tpu_experiments.data.tokens.word_starts import word_starts
from tpu_experiments.metrics.flops import FlopsPerToken, encoder_flops
from tpu_experiments.models.parts.dropout import NOISE, place_words, token_words
from tpu_experiments.models.passes.forward import masked_features
from tpu_experiments.models.passes.loss import Scores, chunked_losses, chunked_scores
from tpu_experiments.objectives.base import Computing, Objective, Rows
from tpu_experiments.objectives.vocabulary import Vocabulary, vocabulary_of

CHOSEN, REPLACED, RANDOM = range(3)
"""Sites of the draws of a token: whether it is masked, what with, and the random token."""


class Masking(NamedTuple):
    """Rows with masked tokens, and these tokens gathered."""

    rows: dict[str, Tensor]
    picks_RKT: Tensor
    """1 where a place holds a token, float32: a one-hot matrix for each row."""
    targets_RK: Tensor
    """The masked tokens, int32; 0 at empty places."""
    weights_RK: Tensor
    """1 where a place is filled, float32."""


class Masked(Objective):
    """Cross-entropy of masked tokens in nats.

    Of the tokens to be learnt (`learn`) that are not special, each is chosen with `mask_rate` and predicted. The chosen
    are replaced by the mask token, by a random token, or left as they are. With `whole_word` the tokens of a word are
    chosen by one draw, that of its first token.

    Logits are computed for the chosen tokens alone: a fixed number of places of every row, filled by a product with a
    one-hot matrix. GSPMD splits that by rows, and its gradient is a product too; a gather's would be a scatter. Of rows
    of 1,024 tokens at a rate of 0.3 it is 39 % of the head's products, and the memory of its logits, for K / V of them
    more.
    """

    draws = True
    has_scores = True
    causal = False
    head = "masked_lm"
    takes_tokenizer = True
    masks_in_turn = True
    words_of_evaluation = (
        "loss, perplexity and accuracy are of masked tokens, given the others on both sides; unigram and bigram: "
        "accuracies of the training split's most frequent token, and of the most frequent one behind the token to "
        "the left, masked or not"
    )

    def __init__(
        self,
        *,
        mask_rate: float = 0.15,
        replace_mask: float = 0.8,
        replace_random: float = 0.1,
        mask_token: str | None = None,
        whole_word: bool = False,
        computing: Computing | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Read what masking needs from the tokenizer; a plan has none, and its programs have other constants.

        Raises:
            ConfigError: the shares of replacements exceed 1, or the tokenizer has no mask token or, for `whole_word`,
                does not say where words begin.
        """
        if replace_mask + replace_random > 1:
            raise ConfigError(
                f"objective.replace_mask={replace_mask} and objective.replace_random={replace_random}; together they "
                "exceed 1; the rest of the chosen tokens stays as it is: use 0.8 and 0.1, for example."
            )
        self.mask_rate, self.replace_mask, self.replace_random = mask_rate, replace_mask, replace_random
        self.computing = computing or Computing()
        self.vocabulary = Vocabulary(0, 2, ()) if tokenizer is None else vocabulary_of(tokenizer, mask_token=mask_token)
        self.whole_word = whole_word
        self.starts_V: Tensor | None = None
        """1 for each token that begins a word, int32 on the device; None where tokens are chosen one by one."""
        if whole_word:
            starts_V = torch.ones(1, dtype=torch.int32) if tokenizer is None else starts_of(tokenizer)
            self.starts_V = self.computing.place(starts_V, name="starts_of_words")

    @classmethod
    def flops(cls, config: Config, arch: Any, *, seq_len: int) -> FlopsPerToken:
        """Return the FLOPs of an encoder whose head reads the places for masked tokens."""
        settings = config.objective
        if not isinstance(settings, MaskedConfig):
            return super().flops(config, arch, seq_len=seq_len)
        places = num_places(seq_len, rate=settings.mask_rate, whole_word=settings.whole_word)
        return encoder_flops(arch, seq_len=seq_len, places=places, config=config)

    def count(self, rows: Rows) -> Tensor:
        """Return the number of masked tokens."""
        return self.chosen(rows).to(torch.float32).sum()

    def row_loss(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """Return loss sum in nats and number of masked tokens of every row."""
        masking = self.masking(rows)
        features_RKH, head_VH = self._features(module, parameters, masking)
        terms = self.computing.terms(features_RKH)
        losses_R = chunked_losses(features_RKH, head_VH, masking.targets_RK, masking.weights_RK, terms)
        return losses_R, masking.weights_RK.sum(1)

    def scores(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Scores:
        """Return loss in nats and hit of the masked tokens, at the position before each; 0 at the others."""
        masking = self.masking(rows)
        with torch.no_grad():
            features_RKH, head_VH = self._features(module, parameters, masking)
            sums_R, losses_RK, hits_RK = chunked_scores(
                features_RKH, head_VH, masking.targets_RK, masking.weights_RK, self.computing.terms(features_RKH)
            )
            spread = [
                torch.roll((masking.picks_RKT * each_RK[..., None]).sum(1), -1, dims=1)
                for each_RK in (losses_RK, hits_RK, masking.weights_RK)
            ]
        return Scores(sums_R, masking.weights_RK.sum(1), *spread)

    def masked_scores(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows, *, places: int) -> Scores:
        """Return loss in nats and hit of the tokens of `learn`, as `Objective.masked_scores` says; nothing is drawn."""
        is_masked_RT = rows["learn"] > 0
        masking = gathered(rows, torch.where(is_masked_RT, self.vocabulary.mask_id, rows["ids"]), is_masked_RT, places)
        with torch.no_grad():
            features_RKH, head_VH = self._features(module, parameters, masking)
            sums_R, losses_RK, hits_RK = chunked_scores(
                features_RKH, head_VH, masking.targets_RK, masking.weights_RK, self.computing.terms(features_RKH)
            )
        weights_RK = masking.weights_RK
        return Scores(sums_R, weights_RK.sum(1), losses_RK * weights_RK, hits_RK * weights_RK, weights_RK)

    def chosen(self, rows: Rows) -> Tensor:
        """Return which tokens are predicted, (R, T) boolean."""
        ids_RT = rows["ids"]
        may_RT = (rows["learn"] > 0) & (rows["segments"] > 0)
        for first, last in self.vocabulary.special:
            may_RT = may_RT & ((ids_RT < first) | (ids_RT > last))
        if self.starts_V is None:
            words_RT = self._words(rows, CHOSEN)
        else:
            words_RT = place_words(rows[NOISE], self._first_places(rows, self.starts_V), site=CHOSEN)
        drawn_RT = may_RT & (words_RT < below(self.mask_rate))
        places = self._num_places(ids_RT.shape[1])
        return drawn_RT & (drawn_RT.cumsum(1, dtype=torch.int32) <= places)

    def masking(self, rows: Rows) -> Masking:
        """Return the rows as the model reads them, and what it is to predict."""
        ids_RT, chosen_RT = rows["ids"], self.chosen(rows)
        words_RT = self._words(rows, REPLACED)
        is_mask_RT = chosen_RT & (words_RT < below(self.replace_mask))
        is_changed_RT = chosen_RT & (words_RT < below(self.replace_mask + self.replace_random))
        random_RT = torch.remainder(self._words(rows, RANDOM) & 0x7FFFFFFF, self.vocabulary.size)
        read_RT = torch.where(is_changed_RT, random_RT, ids_RT)
        read_RT = torch.where(is_mask_RT, self.vocabulary.mask_id, read_RT)
        return gathered(rows, read_RT, chosen_RT, self._num_places(ids_RT.shape[1]))

    def _first_places(self, rows: Rows, starts_V: Tensor) -> Tensor:
        """Return the place in the row of the first token of every token's word, (R, T) int32.

        A special token is a word, and words end with their document and after `MOST_PIECES` tokens.
        """
        ids_RT, segments_RT = rows["ids"], rows["segments"]
        is_special_RT = self.vocabulary.is_special(ids_RT)
        # The first token of a row follows none.
        follows_RT = F.pad((segments_RT[:, 1:] == segments_RT[:, :-1]) & ~is_special_RT[:, :-1], (1, 0))
        starts_RT = (starts_V[ids_RT] > 0) | is_special_RT | ~follows_RT
        place_T = torch.arange(ids_RT.shape[1], dtype=torch.int32, device=ids_RT.device)
        first_RT = torch.cummax(torch.where(starts_RT, place_T, 0), 1).values
        return place_T - torch.remainder(place_T - first_RT, MOST_PIECES)

    def _num_places(self, length: int) -> int:
        return num_places(length, rate=self.mask_rate, whole_word=self.whole_word)

    def _features(self, module: nn.Module, parameters: Mapping[str, Tensor], masking: Masking) -> tuple[Tensor, Tensor]:
        """Return what the vocabulary's matrix multiplies (R, K, H), and that matrix, with a bias as one more feature.

        The feature of the bias is 1, so that the loss in chunks needs no case of its own for it.
        """
        features_RKH, head_VH, bias_V = masked_features(module, parameters, masking.rows, picks_RKT=masking.picks_RKT)
        if bias_V is None:
            return features_RKH, head_VH
        ones = torch.ones_like(features_RKH[..., :1])
        return torch.cat((features_RKH, ones), -1), torch.cat((head_VH, bias_V[:, None].to(head_VH.dtype)), 1)

    def _words(self, rows: Rows, site: int) -> Tensor:
        return token_words(rows[NOISE], length=rows["ids"].shape[1], site=site)


def gathered(rows: Rows, read_RT: Tensor, chosen_RT: Tensor, places: int) -> Masking:
    """Return rows that are read as `read_RT`, with the chosen tokens gathered into K places; of more, the first.

    Args:
        places: K.
    """
    ids_RT = rows["ids"]
    read_RT = read_RT.to(ids_RT.dtype)
    number_K = torch.arange(1, places + 1, dtype=torch.int32, device=ids_RT.device)
    rank_RT = chosen_RT.cumsum(1, dtype=torch.int32)
    picks_RKT = (rank_RT[:, None] == number_K[:, None]) & chosen_RT[:, None]
    return Masking(
        {**rows, "ids": read_RT},
        picks_RKT.to(torch.float32),
        torch.where(picks_RKT, ids_RT[:, None], 0).sum(-1, dtype=torch.int32),
        picks_RKT.any(-1).to(torch.float32),
    )


def below(probability: float) -> int:
    """Return the int32 that a random word is below with this probability."""
    return min(round(probability * 2**32) - 2**31, 2**31 - 1)


def starts_of(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Return 1 for each token that begins a word, else 0, (V,) int32.

    Raises:
        ConfigError: the tokenizer's vocabulary does not say it.
    """
    found = word_starts(tokenizer)
    if found is None:
        raise ConfigError(
            f"objective.whole_word=true; the vocabulary of the tokenizer {tokenizer.name_or_path} does not mark where "
            "words begin (by ##, ▁ or Ġ); leave it out, or make a tokenizer that does: task=tokenizer."
        )
    return torch.from_numpy(found.astype(np.int32))
