"""The gated delta rule (arXiv 2412.06464) in plain torch: over rows of packed documents, and token by token.

A head holds a matrix S. With decay a in (0, 1], learning rate b, key k and query q of length 1, token t makes of it

    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T,   o_t = S_t^T q_t / sqrt(D)

In chunks (arXiv 2406.06484, section 3) the corrections of a chunk's tokens depend on one another by a lower triangular
matrix I + A, A_ij = b_i (k_i k_j) a_{j+1} ... a_i for j < i: one system for each chunk, and S is handed from chunk to
chunk. At the first token of a document the decay is zero, so that packed documents are as alone. Nothing here depends
on values: one shape is one program. All is float32, as in transformers (5.23), whose `solve_triangular` torch_xla
computes on the host; here products invert the matrix (`inverse_of_unit_lower`).

Legend: B rows, N heads, T tokens, D width of queries and keys, E width of values, K chunks, L tokens of a chunk, C
channels of the convolution, W its width."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tpu_experiments.config.recurrence import delta_chunk_of
from tpu_experiments.models.families.chunks import OUTSIDE, in_chunks, sums_of_logs
from tpu_experiments.runtime.kernels.attention import LANES
from tpu_experiments.runtime.kernels.delta import EPS, delta_rule, has_delta_kernel


@dataclass(frozen=True)
class Rule:
    """Inputs of the rule for whole rows."""

    query_BNTD: Tensor
    key_BNTD: Tensor
    value_BNTE: Tensor
    log_decay_BNT: Tensor
    """At most 0, float32."""
    rate_BNT: Tensor


def over_rows(rule: Rule, segments_BT: Tensor, *, chunk_tokens: int | None = None) -> Tensor:
    """Return what the rule makes of rows of packed documents, (B, N, T, E) float32.

    A TPU has a kernel (runtime/kernels/delta.py) for heads of 128 features and rows that chunks of 128 tokens divide,
    whose result is rounded to the data type of the values. All else is computed in the plain operations below.

    Args:
        segments_BT: numbers of documents, one after another; padding, 0, is a document of its own.
        chunk_tokens: L, a power of two; None is that of config/recurrence.py.
    """
    if chunk_tokens is None and has_delta_kernel(rule.query_BNTD, rule.value_BNTE):
        return _by_kernel(rule, segments_BT)
    return with_last_state(rule, segments_BT, chunk_tokens=chunk_tokens)[0]


def _by_kernel(rule: Rule, segments_BT: Tensor) -> Tensor:
    """Return the result of `over_rows`, of queries, keys and values as the projections write them."""
    sums = sums_of_logs(rule.log_decay_BNT.float(), size=LANES)
    numbers_BNKXL = torch.stack([*sums, rule.rate_BNT.float().unflatten(2, (-1, LANES))], 3)
    each = (rule.query_BNTD, rule.key_BNTD, rule.value_BNTE)
    query, key, value = (tensor.to(rule.value_BNTE.dtype).transpose(1, 2).flatten(2) for tensor in each)
    return delta_rule(query, key, value, numbers_BNKXL, segments_BT).float()


def with_last_state(rule: Rule, segments_BT: Tensor, *, chunk_tokens: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the result of `over_rows`, and the state (B, N, D, E) after the last token of each row."""
    num_tokens = segments_BT.shape[1]
    chunks = _Chunks.of(rule, segments_BT, size=chunk_tokens or delta_chunk_of(num_tokens))
    made, last = chunks.outputs()
    return made[:, :, -num_tokens:], last


def one_token(rule: Rule, state_BNDE: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the rule makes of the next token, (B, N, 1, E), and the state after it.

    Args:
        rule: inputs of one token, T = 1, of the document that the state is of.
    """
    query, key = (each[:, :, 0] for each in (scaled_query(rule.query_BNTD), of_length_1(rule.key_BNTD)))
    state_BNDE = state_BNDE * torch.exp(rule.log_decay_BNT[..., 0].float())[..., None, None]
    known_BNE = (state_BNDE * key[..., None]).sum(-2)
    change_BNE = (rule.value_BNTE[:, :, 0].float() - known_BNE) * rule.rate_BNT.float()
    state_BNDE = state_BNDE + key[..., None] * change_BNE[..., None, :]
    return (state_BNDE * query[..., None]).sum(-2)[:, :, None], state_BNDE


def of_length_1(vectors: Tensor) -> Tensor:
    """Divide vectors (..., D) by their length, float32."""
    vectors = vectors.float()
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + EPS)


def scaled_query(query: Tensor) -> Tensor:
    """Return queries of length 1 / sqrt(D), float32."""
    return of_length_1(query) * query.shape[-1] ** -0.5


def causal_convolution(tokens_BTC: Tensor, weight_CW: Tensor, segments_BT: Tensor) -> Tensor:
    """Return sums over each token and the W - 1 before it in its document, channel by channel, float32."""
    made: Tensor = _Convolution.apply(tokens_BTC, weight_CW, segments_BT)
    return made


class _Convolution(Function):
    """The sums, and gradients in the same form: autograd's own write an array of float32 for each of the W tokens."""

    @staticmethod
    def forward(ctx: Any, tokens_BTC: Tensor, weight_CW: Tensor, segments_BT: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_BTC, weight_CW, segments_BT)
        return _summed(tokens_BTC, weight_CW, segments_BT, towards=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTC: Tensor) -> tuple[Tensor | None, ...]:
        tokens_BTC, weight_CW, segments_BT = ctx.saved_tensors
        of_tokens, of_weight, _ = ctx.needs_input_grad
        grad_CW = None
        if of_weight:
            each = (_moved(tokens_BTC, segments_BT, back) * grad_BTC for back in reversed(range(weight_CW.shape[1])))
            grad_CW = torch.stack([products_BTC.sum((0, 1)) for products_BTC in each], 1).to(weight_CW.dtype)
        grad = _summed(grad_BTC, weight_CW, segments_BT, towards=-1).to(tokens_BTC.dtype) if of_tokens else None
        return grad, grad_CW, None


def _summed(tokens_BTC: Tensor, weight_CW: Tensor, segments_BT: Tensor, *, towards: int) -> Tensor:
    """Return the weighted sums over each token and those before it (`towards` 1), or behind it (-1)."""
    weight_CW, width = weight_CW.float(), weight_CW.shape[1]
    summed = tokens_BTC.float() * weight_CW[:, -1]
    for back in range(1, width):
        summed = summed + _moved(tokens_BTC, segments_BT, towards * back) * weight_CW[:, width - 1 - back]
    return summed


def _moved(tokens_BTC: Tensor, segments_BT: Tensor, back: int) -> Tensor:
    """Return what is `back` tokens before each token, 0 where that is of another document, float32."""
    length = segments_BT.shape[1]
    before, after = max(back, 0), max(-back, 0)
    cut = slice(after, after + length)
    is_own_BT = F.pad(segments_BT, (before, after), value=OUTSIDE)[:, cut] == segments_BT
    return F.pad(tokens_BTC, (0, 0, before, after))[:, cut].float() * is_own_BT[..., None]


def inverse_of_unit_lower(strict: Tensor) -> Tensor:
    """Return (I + A)^-1 of matrices A (..., L, L), of which what is below the diagonal is read; L is a power of two.

    Blocks on the diagonal are inverted, of twice the size in each round: the inverse of [[P, 0], [Q, R]] is
    [[P^-1, 0], [-R^-1 Q P^-1, R^-1]]. Two products a round, as many as (I - A)(I + A^2)(I + A^4)... takes, whose powers
    of A grow to 1e17 where the keys of 64 tokens are the same, as those of padding are, and cancel.
    """
    made: Tensor = _Inverse.apply(strict)
    return made


class _Inverse(Function):
    """The inverse X, and from its gradient G that of A, -X^T G X^T: two products, in the place of two a round."""

    @staticmethod
    def forward(ctx: Any, strict: Tensor) -> Tensor:
        size = strict.shape[-1]
        index_L = torch.arange(size, device=strict.device, dtype=torch.int32)
        apart_LL = index_L[:, None] ^ index_L[None, :]
        below_LL = index_L[:, None] > index_L[None, :]
        inverse = (index_L[:, None] == index_L[None, :]).to(strict.dtype) - strict.masked_fill(
            ~(below_LL & (apart_LL < 2)), 0.0
        )
        half = 2
        while half < size:
            is_between_LL = below_LL & (apart_LL >= half) & (apart_LL < 2 * half)
            inverse = inverse - inverse @ strict.masked_fill(~is_between_LL, 0.0) @ inverse
            half *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed).tril(-1)


@dataclass(frozen=True)
class _Chunks:
    """Rows in chunks; the first chunk begins with padding where they do not divide a row."""

    query_BNKLD: Tensor
    """Of length 1 / sqrt(D)."""
    key_BNKLD: Tensor
    """Of length 1."""
    value_BNKLE: Tensor
    rate_BNKL: Tensor
    coarse_BNKL: Tensor
    """Sums over the chunk's tokens so far of the logarithms of decays, rounded to a multiple of `GRID`."""
    fine_BNKL: Tensor
    """The sums of what rounding left."""
    segments_B1KL: Tensor

    @staticmethod
    def of(rule: Rule, segments_BT: Tensor, *, size: int) -> "_Chunks":
        coarse_BNKL, fine_BNKL = sums_of_logs(rule.log_decay_BNT.float(), size=size)
        return _Chunks(
            in_chunks(scaled_query(rule.query_BNTD), size=size, dim=2),
            in_chunks(of_length_1(rule.key_BNTD), size=size, dim=2),
            in_chunks(rule.value_BNTE.float(), size=size, dim=2),
            in_chunks(rule.rate_BNT.float(), size=size, dim=2),
            coarse_BNKL,
            fine_BNKL,
            in_chunks(segments_BT, size=size, dim=1, fill=OUTSIDE)[:, None],
        )

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Return (B, N, K * L, E) and the state after the last chunk (B, N, D, E)."""
        decay = self._decay_within()
        key_BNKDL = self.key_BNKLD.transpose(-1, -2)
        inverse = inverse_of_unit_lower(self.key_BNKLD @ key_BNKDL * decay * self.rate_BNKL[..., None])
        since_BNKL1 = self._decay_of_state()
        rate_BNKL1 = self.rate_BNKL[..., None]
        new_BNKLE = inverse @ (self.value_BNKLE * rate_BNKL1)
        read_BNKLD = inverse @ (self.key_BNKLD * (rate_BNKL1 * since_BNKL1))
        scores_BNKLL = self.query_BNKLD @ key_BNKDL * decay
        before, last = self._states(new_BNKLE, read_BNKLD)
        if before is None:
            return (scores_BNKLL @ new_BNKLE).flatten(2, 3), last
        new_BNKLE = new_BNKLE - read_BNKLD @ before
        return (scores_BNKLL @ new_BNKLE + (self.query_BNKLD * since_BNKL1) @ before).flatten(2, 3), last

    def _decay_within(self) -> Tensor:
        """Return the decay from each token to a later one or itself of its document and chunk, (B, N, K, L, L)."""
        segments, size = self.segments_B1KL, self.segments_B1KL.shape[-1]
        causal_LL = torch.ones(size, size, dtype=torch.bool, device=segments.device).tril()
        is_seen = causal_LL & (segments[..., :, None] == segments[..., None, :])
        coarse, fine = (each[..., :, None] - each[..., None, :] for each in (self.coarse_BNKL, self.fine_BNKL))
        return torch.exp((coarse + fine).masked_fill(~is_seen, -torch.inf))

    def _decay_of_state(self) -> Tensor:
        """Return the decay from the state before a chunk to each token, 0 where it is of another document."""
        is_same = self.segments_B1KL == self._segments_before()[..., None]
        return torch.exp((self.coarse_BNKL + self.fine_BNKL).masked_fill(~is_same, -torch.inf))[..., None]

    def _segments_before(self) -> Tensor:
        """Return the segment of the token before each chunk, (B, 1, K)."""
        return F.pad(self.segments_B1KL[..., :-1, -1], (1, 0), value=OUTSIDE - 1)

    def _states(self, new_BNKLE: Tensor, read_BNKLD: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the state before each chunk (B, N, K, D, E), None where there is one chunk, and after the last one.

        Args:
            new_BNKLE: corrections of an empty state.
            read_BNKLD: what they subtract from it, as products with the state before the chunk.
        """
        last_B1K1 = self.segments_B1KL[..., -1:]
        coarse, fine = (each[..., -1:] - each for each in (self.coarse_BNKL, self.fine_BNKL))
        until_BNKL = torch.exp((coarse + fine).masked_fill(self.segments_B1KL != last_B1K1, -torch.inf))
        written_BNKDL = (self.key_BNKLD * until_BNKL[..., None]).transpose(-1, -2)
        state, *added = (written_BNKDL @ new_BNKLE).unbind(2)
        if not added:
            return None, state
        # Taken apart at once: the gradient of a chunk that is indexed is as large as all of them.
        removed = (written_BNKDL @ read_BNKLD).unbind(2)
        kept = self._decay_of_state()[..., -1:, :].unbind(2)
        before = [torch.zeros_like(state)]
        for kept_BN11, removed_BNDD, added_BNDE in zip(kept[1:], removed[1:], added, strict=True):
            before.append(state)
            state = state * kept_BN11 - removed_BNDD @ state + added_BNDE
        return torch.stack(before, 2), state
