"""Masked diffusion (LLaDA, arXiv 2502.09992; MDLM, arXiv 2406.07524): a text from its masked form, at every rate.

The model is a decoder without its causal mask. In training every document has a time t of its own, uniform in [0, 1);
each of its tokens is masked with probability p = (1 - e) t + e, and the loss is 1 / p times the cross-entropy of the
masked ones. In evaluations exactly l of the document's L tokens are masked, l uniform in 1 to L, and the weight is L /
l, which varies less. Up to e both have one expectation, an upper bound of -log p of the document in nats:

    sum over the non-empty sets S of masked tokens of  -log p(x_S | the others, token by token) / (|S| C(L, |S|))

The logit of the mask token counts as minus infinity, and tokens that are not masked have no loss (SUBS in MDLM). As for
decoders, the first token of a document is given.
Legend: R rows, T tokens, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.escaping import as_code
from tpu_experiments.config.objectives.masked_diffusion import MaskedDiffusionConfig
from tpu_experiments.config.schema import Config
from tpu_experiments.models.adapters.token_rows import trained_rows_of
from tpu_experiments.models.parts.dropout import GOLDEN, NOISE, token_words, uniform
from tpu_experiments.models.passes.forward import has_plain_head, hidden_of, logits_of, soft_cap_of
from tpu_experiments.models.passes.loss import Scores, chunked_losses, chunked_scores
from tpu_experiments.objectives.base import Computing, Objective, Rows, Summary
from tpu_experiments.objectives.masked import CHOSEN
from tpu_experiments.objectives.vocabulary import vocabulary_of

SUMS = ("nats", "tokens", "hits", "nats_squared", "nats_tokens", "tokens_squared")
"""Sums over held-out rows; the last three are of the rows' squares and products, for the interval of the mean."""
NORMAL_95 = 1.96
"""Standard errors on each side of a mean that hold 95 % of a normal distribution."""


class Masking(NamedTuple):
    """Rows with masked tokens, and the weight of each in the loss."""

    rows: dict[str, Tensor]
    weights_RT: Tensor
    """Weight of a masked token, 0 of the others, float32."""


class MaskedDiffusion(Objective):
    """Weighted cross-entropy of masked tokens in nats, divided by the number of tokens that could be masked.

    Which tokens are masked is a function of the row's random word, as in objectives/masked.py. The words of a batch are
    equally spaced, and the times of a row's documents by the golden ratio, so that a batch has all rates of masking.

    Args:
        mask_token: stands for a masked token where the tokenizer has no mask token of its own.
        min_mask_rate: e.
        end_padding: in training the padding behind a row's answer is part of it, as end-of-sequence tokens.
    """

    draws = True
    spread_draws = True
    causal = False
    takes_tokenizer = True
    denoises = True
    has_perplexity = False
    has_bound = True
    words_of_evaluation = (
        "loss: an upper bound of -log p in nats per token, estimated with one draw of masks for each document; "
        "accuracy: of masked tokens, at a number of them that is uniform in 1 to all"
    )

    def __init__(
        self,
        *,
        mask_token: str | None = None,
        min_mask_rate: float = 1e-3,
        end_padding: bool = False,
        computing: Computing | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Read the mask token's id from the tokenizer; a plan has none, and its programs have other constants.

        Raises:
            ConfigError: the tokenizer has no mask token, or does not know the one that is named.
        """
        self.min_mask_rate, self.end_padding = min_mask_rate, end_padding
        self.computing = computing or Computing()
        self.mask_id = self.end_id = 0
        if tokenizer is not None:
            self.mask_id = vocabulary_of(tokenizer, mask_token=mask_token).mask_id
            self.end_id = tokenizer.eos_token_id or 0

    @classmethod
    def require_fit(cls, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        """Require the mask token to be none of the chat format's, since it is never predicted.

        Raises:
            ConfigError: conversations hold it.
        """
        token = str(tokenizer.mask_token or cls._mask_token(config))
        chats = [name for name, source in config.data.items() if source.kind == "chat"]
        if chats and token in str(tokenizer.chat_template or ""):
            raise ConfigError(
                f"objective.mask_token={token}; the chat format writes it into every conversation of data.{chats[0]}, "
                "and a mask token is never predicted; name a token that no text has, such as a reserved one."
            )

    @classmethod
    def words_of_results(cls, config: Config, num_predictions: int, *, num_tokens: int) -> str:
        """Return what the bound is of."""
        return (
            f"Over {num_predictions:,} tokens of documents that were not trained on. "
            "The loss is an upper bound of -log p in nats per token; `perplexity bound` is its exponential, which the "
            "perplexity does not exceed, with the ends of its 95 % interval. Accuracy is of masked tokens, at a number "
            "of them that is uniform in 1 to all."
        )

    @classmethod
    def lines_of_use(cls, config: Config) -> tuple[list[str], str]:
        """Return how the class of a causal decoder attends to both sides."""
        named = cls._mask_token(config)
        token = f", or {as_code(named)} where it has none" if named else ""
        return [
            "# The class is a causal decoder's: a mask that hides nothing, (rows, 1, tokens, tokens), opens it.",
            "# logits = model(input_ids=ids, attention_mask=torch.zeros(1, 1, ids.shape[1], ids.shape[1])).logits",
        ], (
            f"The model predicts masked tokens (the tokenizer's mask token{token}) from both sides, each at its "
            "own place. The class's `generate` is for causal models and writes nonsense with it."
        )

    @staticmethod
    def _mask_token(config: Config) -> str | None:
        return config.objective.mask_token if isinstance(config.objective, MaskedDiffusionConfig) else None

    def count(self, rows: Rows) -> Tensor:
        """Return the number of tokens that could be masked."""
        return self.maskable(self.ended(rows)).to(torch.float32).sum()

    def row_loss(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
        """Return loss sum in nats and number of tokens that could be masked, of every row."""
        whole = self.ended(rows)
        masking = self.masked_by_chance(whole)
        counts_R = self.maskable(whole).to(torch.float32).sum(1)
        if not has_plain_head(module):
            losses_RT, _ = self._by_logits(module, parameters, masking, targets_RT=whole["ids"])
            return (losses_RT * masking.weights_RT).sum(1), counts_R
        hidden_RTH, head_VH = hidden_of(module, parameters, masking.rows, causal=False)
        rows_N = trained_rows_of(module)
        terms = self.computing.terms(hidden_RTH, soft_cap=soft_cap_of(module), left_out=self.mask_id, rows_N=rows_N)
        return chunked_losses(hidden_RTH, head_VH, whole["ids"], masking.weights_RT, terms), counts_R

    def scores(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Scores:
        """Return weighted loss in nats and weighted hit of every token, at the position before it.

        Their sums over a document, divided by its tokens, are estimates without bias of the bound and of the accuracy
        at a number of masked tokens that is uniform in 1 to all. Padding is never part of an answer here.
        """
        with torch.no_grad():
            masking = self.masked_exactly(rows)
            weights_RT, tokens_RT = masking.weights_RT, self.maskable(rows).to(torch.float32)
            losses_RT, hits_RT = self.losses_and_hits(module, parameters, masking, targets_RT=rows["ids"])
            weighted = [losses_RT * weights_RT, hits_RT * weights_RT, tokens_RT]
            spread = [torch.roll(each_RT, -1, dims=1) for each_RT in weighted]
        return Scores(weighted[0].sum(1), tokens_RT.sum(1), *spread)

    def sums(self, module: nn.Module, parameters: Mapping[str, Tensor], rows: Rows) -> Tensor:
        """Return the sums of `SUMS` over the rows, (6,)."""
        found = self.scores(module, parameters, rows)
        nats_R, tokens_R = found.sums_R, found.weights_R
        each = [nats_R, tokens_R, found.hits_RT, nats_R * nats_R, nats_R * tokens_R, tokens_R * tokens_R]
        return torch.stack([tensor.sum() for tensor in each])

    def summary(self, sums: Sequence[float]) -> Summary:
        """Return the bound in nats per token, and its exponential with an interval over the rows.

        `perplexity_bound` is above the perplexity. The interval, 95 % by the standard error of a ratio, is of the
        documents and of the draws together; equally spaced times make it wider than it need be.
        """
        own = dict(zip(SUMS, sums, strict=True))
        if not own["tokens"]:
            return Summary(math.nan, 0, {})
        bound = own["nats"] / own["tokens"]
        squares = own["nats_squared"] - 2 * bound * own["nats_tokens"] + bound**2 * own["tokens_squared"]
        error = math.sqrt(max(squares, 0.0)) / own["tokens"]
        ends = {"": bound, "_low": bound - NORMAL_95 * error, "_high": bound + NORMAL_95 * error}
        measures = {f"perplexity_bound{end}": math.exp(value) for end, value in ends.items() if value < 700}
        return Summary(bound, round(own["tokens"]), measures | {"accuracy": own["hits"] / own["tokens"]})

    # ---- masks ----------------------------------------------------------------------------------------------

    def maskable(self, rows: Rows) -> Tensor:
        """Return which tokens could be masked, (R, T) boolean: those to be learnt."""
        return (rows["learn"] > 0) & (rows["segments"] > 0) & (rows["ids"] != self.mask_id)

    def masked_by_chance(self, rows: Rows) -> Masking:
        """Mask each token with its document's probability p, with a weight of 1 / p."""
        rate_RT = (1 - self.min_mask_rate) * times(rows) + self.min_mask_rate
        is_masked_RT = self.maskable(rows) & (uniform(self._words(rows)) < rate_RT)
        return self._masking(rows, is_masked_RT, 1 / rate_RT)

    def masked_exactly(self, rows: Rows) -> Masking:
        """Mask l of the L tokens of every document, l uniform in 1 to L, with a weight of L / l."""
        may_RT, words_RT = self.maskable(rows), self._words(rows)
        index_T = torch.arange(may_RT.shape[1], dtype=torch.int32, device=may_RT.device)
        other_RTT = (rows["segments"][:, :, None] == rows["segments"][:, None, :]) & may_RT[:, None, :]
        is_tie_RTT = (words_RT[:, None, :] == words_RT[:, :, None]) & (index_T < index_T[:, None])
        is_before_RTT = other_RTT & ((words_RT[:, None, :] < words_RT[:, :, None]) | is_tie_RTT)
        # Counts by comparison: a sort is slow on a TPU, and these fuse into one loop without a matrix in memory.
        total_RT = other_RTT.sum(-1, dtype=torch.int32).to(torch.float32)
        rank_RT = is_before_RTT.sum(-1, dtype=torch.int32).to(torch.float32)
        chosen_RT = torch.minimum(torch.floor(times(rows) * total_RT) + 1, total_RT)
        return self._masking(rows, may_RT & (rank_RT < chosen_RT), total_RT / chosen_RT.clamp(min=1))

    def ended(self, rows: Rows) -> Rows:
        """Return the rows with padding as end-of-sequence tokens of the last answer, where that is learnt."""
        if not self.end_padding:
            return rows
        index_T = torch.arange(rows["ids"].shape[1], dtype=torch.int32, device=rows["ids"].device)
        last_R1 = (rows["segments"] > 0).sum(1, keepdim=True, dtype=torch.int32) - 1

        def of_last(name: str) -> Tensor:
            return torch.where(index_T == last_R1, rows[name], 0).sum(1, keepdim=True, dtype=torch.int32)

        is_end_RT = (index_T > last_R1) & (of_last("learn") > 0)
        filled = {
            "ids": torch.full_like(rows["ids"], self.end_id),
            "learn": torch.ones_like(rows["learn"]),
            "positions": of_last("positions") + index_T - last_R1,
            "segments": of_last("segments"),
        }
        return {**rows, **{name: torch.where(is_end_RT, value, rows[name]) for name, value in filled.items()}}

    def _masking(self, rows: Rows, is_masked_RT: Tensor, weights_RT: Tensor) -> Masking:
        read_RT = torch.where(is_masked_RT, self.mask_id, rows["ids"]).to(rows["ids"].dtype)
        return Masking({**rows, "ids": read_RT}, torch.where(is_masked_RT, weights_RT, 0.0))

    def _words(self, rows: Rows) -> Tensor:
        return token_words(rows[NOISE], length=rows["ids"].shape[1], site=CHOSEN)

    # ---- losses ---------------------------------------------------------------------------------------------

    def losses_and_hits(
        self, module: nn.Module, parameters: Mapping[str, Tensor], masking: Masking, *, targets_RT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return loss in nats and hit of every token of masked rows, (R, T) each, whatever its weight."""
        if not has_plain_head(module):
            return self._by_logits(module, parameters, masking, targets_RT=targets_RT)
        hidden_RTH, head_VH = hidden_of(module, parameters, masking.rows, causal=False)
        terms = self.computing.terms(hidden_RTH, soft_cap=soft_cap_of(module), left_out=self.mask_id)
        _, losses_RT, hits_RT = chunked_scores(hidden_RTH, head_VH, targets_RT, masking.weights_RT, terms)
        return losses_RT, hits_RT

    def _by_logits(
        self, module: nn.Module, parameters: Mapping[str, Tensor], masking: Masking, *, targets_RT: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits_RTV = without_token(logits_of(module, parameters, masking.rows, causal=False).float(), self.mask_id)
        losses = F.cross_entropy(logits_RTV.flatten(0, 1), targets_RT.flatten().long(), reduction="none")
        own_RT = torch.gather(logits_RTV.detach(), -1, targets_RT[..., None].long())[..., 0]
        hits_RT = (logits_RTV.detach().amax(-1) <= own_RT).to(torch.float32)
        return losses.view(targets_RT.shape), hits_RT


def times(rows: Rows) -> Tensor:
    """Return the time of every token's document, (R, T) float32 in [0, 1).

    A row's word is the time of its first document; those behind it follow by the golden ratio, modulo 1.
    """
    return uniform(rows[NOISE][:, None] + (rows["segments"] - 1) * GOLDEN)


def without_token(logits: Tensor, token: int) -> Tensor:
    """Return logits (..., V) in which a token has the lowest finite value, so that a weight of 0 times it is 0."""
    index_V = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    return torch.where(index_V == token, torch.finfo(logits.dtype).min, logits)
