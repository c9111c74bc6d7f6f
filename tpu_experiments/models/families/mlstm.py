"""The mLSTM cell of xLSTM (arXiv 2405.04517) in plain torch: over rows of packed documents, and token by token.

A head holds a matrix C, a vector n and a number m. With input gate i and forget gate f before their activations, token
t makes of them, in the log space of the stabiliser m (arXiv 2405.04517, equations 15 to 27):

    m_t = max(log sigmoid(f_t) + m_{t-1}, i_t)
    C_t = exp(log sigmoid(f_t) + m_{t-1} - m_t) C_{t-1} + exp(i_t - m_t) k_t v_t^T, and n_t likewise with k_t
    h_t = C_t^T q_t / (max(|n_t q_t|, exp(-m_t)) + eps), q scaled by 1 / sqrt(D)

The parallel form is the same as a masked product of queries with keys, quadratic in the length of a row. The chunkwise
form (arXiv 2503.13427) is the parallel form within chunks and hands C, n and m from chunk to chunk: linear in the
number of chunks. At the first token of a document the forget gate is zero, so that packed documents are as alone.
Nothing here depends on values: one shape is one program. Gates, sums and the state are float32, products are in the
data type of the queries. m changes no result but through eps, so no gradient passes through it.

Legend: B rows, N heads, T tokens, D width of queries and keys, E width of values, K chunks, L tokens of a chunk."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tpu_experiments.config.recurrence import chunk_of
from tpu_experiments.models.families.chunks import OUTSIDE, in_chunks, sums_of_logs


@dataclass(frozen=True)
class Cell:
    """Inputs of the cell for whole rows."""

    query_BNTD: Tensor
    key_BNTD: Tensor
    value_BNTE: Tensor
    input_BNT: Tensor
    """Input gate before its exponential, float32."""
    forget_BNT: Tensor
    """Forget gate before its sigmoid, float32."""


class State(NamedTuple):
    """What a head remembers of its document, float32."""

    matrix_BNDE: Tensor
    vector_BND: Tensor
    stabiliser_BN: Tensor


def over_rows(cell: Cell, segments_BT: Tensor, *, eps: float, chunk_tokens: int | None = None) -> Tensor:
    """Return what the cell makes of rows of packed documents, (B, N, T, E) in the data type of the values.

    Args:
        segments_BT: numbers of documents, one after another; padding, 0, is a document of its own.
        eps: added to the denominator.
        chunk_tokens: L; None is that of config/recurrence.py, the parallel form up to 512 tokens.
    """
    num_tokens = segments_BT.shape[1]
    chunks = _Chunks.of(cell, segments_BT, size=chunk_tokens or chunk_of(num_tokens))
    return chunks.outputs(eps=eps)[:, :, -num_tokens:]


def with_last_state(cell: Cell, segments_BT: Tensor, *, eps: float) -> tuple[Tensor, State]:
    """Return the result of `over_rows`, and the state after the last token of each row."""
    num_tokens = segments_BT.shape[1]
    chunks = _Chunks.of(cell, segments_BT, size=chunk_of(num_tokens))
    matrix, vector, stabiliser = (each[:, :, -1] for each in chunks.states())
    return chunks.outputs(eps=eps)[:, :, -num_tokens:], State(matrix, vector, stabiliser)


def one_token(cell: Cell, state: State, *, eps: float) -> tuple[Tensor, State]:
    """Return what the cell makes of the next token, (B, N, 1, E), and the state after it.

    Args:
        cell: inputs of one token, T = 1, of the document that the state is of.
    """
    query, key, value = (each[:, :, 0].float() for each in (cell.query_BNTD, cell.key_BNTD, cell.value_BNTE))
    log_forget_BN, log_input_BN = F.logsigmoid(cell.forget_BNT[..., 0]), cell.input_BNT[..., 0]
    kept_BN = log_forget_BN + state.stabiliser_BN
    stabiliser_BN = torch.maximum(kept_BN, log_input_BN)
    forget_BN1 = torch.exp(kept_BN - stabiliser_BN)[..., None]
    key = key * torch.exp(log_input_BN - stabiliser_BN)[..., None]
    matrix_BNDE = forget_BN1[..., None] * state.matrix_BNDE + key[..., None] * value[..., None, :]
    vector_BND = forget_BN1 * state.vector_BND + key
    query = query * query.shape[-1] ** -0.5
    sums_BN = (query * vector_BND).sum(-1)
    products_BNE = (query[..., None] * matrix_BNDE).sum(-2)
    out_BNE = products_BNE / _denominator(sums_BN, stabiliser_BN, eps=eps)[..., None]
    return out_BNE[:, :, None].to(cell.value_BNTE.dtype), State(matrix_BNDE, vector_BND, stabiliser_BN)


def _denominator(sums: Tensor, stabiliser: Tensor, *, eps: float) -> Tensor:
    return torch.maximum(sums.abs(), torch.exp(-stabiliser)) + eps


@dataclass(frozen=True)
class _Chunks:
    """Rows in chunks; the first chunk begins with padding where they do not divide a row."""

    query_BNKLD: Tensor
    key_BNKLD: Tensor
    value_BNKLE: Tensor
    input_BNKL: Tensor
    coarse_BNKL: Tensor
    """Sums over the chunk's tokens so far of the logarithms of forget gates, rounded to a multiple of `GRID`."""
    fine_BNKL: Tensor
    """The sums of what rounding left."""
    segments_B1KL: Tensor

    @staticmethod
    def of(cell: Cell, segments_BT: Tensor, *, size: int) -> "_Chunks":
        coarse_BNKL, fine_BNKL = sums_of_logs(F.logsigmoid(cell.forget_BNT), size=size)
        return _Chunks(
            in_chunks(cell.query_BNTD, size=size, dim=2) * cell.query_BNTD.shape[-1] ** -0.5,
            in_chunks(cell.key_BNTD, size=size, dim=2),
            in_chunks(cell.value_BNTE, size=size, dim=2),
            in_chunks(cell.input_BNT, size=size, dim=2),
            coarse_BNKL,
            fine_BNKL,
            in_chunks(segments_BT, size=size, dim=1, fill=OUTSIDE)[:, None],
        )

    def states(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return matrix (B, N, K, D, E), vector (B, N, K, D) and stabiliser (B, N, K) after each chunk.

        They are of the document of the chunk's last token alone.
        """
        last_B1K, before_B1K = self.segments_B1KL[..., -1], self.before()
        whole_BNK = self.coarse_BNKL[..., -1] + self.fine_BNKL[..., -1]
        coarse, fine = (each[..., -1:] - each for each in (self.coarse_BNKL, self.fine_BNKL))
        decay_BNKL = coarse + fine + self.input_BNKL
        decay_BNKL = decay_BNKL.masked_fill(self.segments_B1KL != last_B1K[..., None], -torch.inf)
        own_BNK = decay_BNKL.detach().amax(-1)
        weights = torch.exp(decay_BNKL - own_BNK[..., None])[..., None] * self.key_BNKLD.float()
        matrices = (weights.to(self.value_BNKLE.dtype).transpose(-1, -2) @ self.value_BNKLE).float()
        vectors = weights.sum(-2)
        goes_on_B1K = last_B1K == before_B1K
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for k in range(own_BNK.shape[2]):
            matrix, vector, stabiliser = matrices[:, :, k], vectors[:, :, k], own_BNK[..., k]
            if found:
                kept = (whole_BNK[..., k] + found[-1][2]).masked_fill(~goes_on_B1K[..., k], -torch.inf)
                stabiliser = torch.maximum(kept.detach(), stabiliser)
                old, new = torch.exp(kept - stabiliser)[..., None], torch.exp(own_BNK[..., k] - stabiliser)[..., None]
                matrix = old[..., None] * found[-1][0] + new[..., None] * matrix
                vector = old * found[-1][1] + new * vector
            found.append((matrix, vector, stabiliser))
        matrix, vector, stabiliser = (torch.stack(each, 2) for each in zip(*found, strict=True))
        return matrix, vector, stabiliser

    def before(self) -> Tensor:
        """Return the segment of the token before each chunk, (B, 1, K)."""
        return F.pad(self.segments_B1KL[..., :-1, -1], (1, 0), value=OUTSIDE - 1)

    def outputs(self, *, eps: float) -> Tensor:
        """Return (B, N, K * L, E) in the data type of the values."""
        segments, size = self.segments_B1KL, self.segments_B1KL.shape[-1]
        causal_LL = torch.ones(size, size, dtype=torch.bool, device=segments.device).tril()
        is_seen = causal_LL & (segments[..., :, None] == segments[..., None, :])
        coarse, fine = (each[..., :, None] - each[..., None, :] for each in (self.coarse_BNKL, self.fine_BNKL))
        decay = coarse + fine + self.input_BNKL[..., None, :]
        decay = decay.masked_fill(~is_seen, -torch.inf)
        stabiliser_BNKL = decay.detach().amax(-1)
        if segments.shape[2] == 1:
            sums_BNKL, products = self._within(decay, stabiliser_BNKL)
        else:
            sums_BNKL, products, stabiliser_BNKL = self._with_states(decay, stabiliser_BNKL)
        return (
            (products / _denominator(sums_BNKL, stabiliser_BNKL, eps=eps)[..., None])
            .flatten(2, 3)
            .to(self.value_BNKLE.dtype)
        )

    def _within(self, decay: Tensor, stabiliser_BNKL: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums of weighted scores (B, N, K, L) and of weighted values (B, N, K, L, E), float32."""
        scores = (self.query_BNKLD @ self.key_BNKLD.transpose(-1, -2)).float()
        scores = scores * torch.exp(decay - stabiliser_BNKL[..., None])
        return scores.sum(-1), (scores.to(self.value_BNKLE.dtype) @ self.value_BNKLE).float()

    def _with_states(self, decay: Tensor, stabiliser_BNKL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the results of `_within` with the state before each chunk, and the stabiliser of both."""
        matrix, vector, before_BNK = (
            F.pad(each[:, :, :-1], (*((0, 0) * (each.ndim - 3)), 1, 0)) for each in self.states()
        )
        is_seen = self.segments_B1KL == self.before()[..., None]
        kept = (self.coarse_BNKL + self.fine_BNKL + before_BNK[..., None]).masked_fill(~is_seen, -torch.inf)
        stabiliser_BNKL = torch.maximum(stabiliser_BNKL, kept.detach())
        sums_BNKL, products = self._within(decay, stabiliser_BNKL)
        query = self.query_BNKLD
        weights_BNKL1 = torch.exp(kept - stabiliser_BNKL)[..., None]
        sums_BNKL = sums_BNKL + (weights_BNKL1 * query.float() * vector[:, :, :, None]).sum(-1)
        products = products + weights_BNKL1 * (query @ matrix.to(query.dtype)).float()
        return sums_BNKL, products, stabiliser_BNKL
