"""Weights as vectors of a codebook: VPTQ (arXiv 2409.17066), in plain torch on the CPU.

A column of W is cut into vectors of `length` output features; each is stored as the number of its nearest vector of a
codebook, and a second codebook may hold what the first leaves. Codebooks are made by k-means whose points have the
weight of their column's entry on the Hessian's diagonal (equation 11 of the paper). Columns are taken one after the
other with GPTQ's feedback of the error, of the sum of both codebooks. The columns of the largest entries may have a
codebook of their own. Legend: N output features, K input features, V vectors of a column, L length, C codebook size."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tpu_experiments.quantisation.grid import Feedback

ROUNDS = 25
"""Rounds of k-means; after 25 the error of a 896 x 896 layer falls by less than 0.1 % a round."""
MAX_POINTS = 2**18
"""Vectors that a codebook is made of; of a larger matrix a random sample."""
CHUNK = 2**24
"""Distances that are in memory at once: 64 MB."""


@dataclass(frozen=True)
class Vectors:
    """How a weight is cut into vectors, and the sizes of its codebooks."""

    length: int = 4
    size: int = 256
    """Vectors of the first codebook."""
    residual: int = 0
    """Vectors of the codebook of what the first one leaves; 0: there is none."""
    outliers: float = 0.0
    """Part of the columns, those of the largest Hessian, that has a codebook of its own."""
    outlier_size: int = 256
    """Vectors of that codebook, of half the length."""

    @property
    def outlier_length(self) -> int:
        """Return the length of the outliers' vectors."""
        return max(1, self.length // 2)

    def num_outliers(self, columns: int) -> int:
        """Return the number of columns with a codebook of their own."""
        return round(self.outliers * columns)

    def bits(self, shape: tuple[int, int]) -> float:
        """Return the bits per weight of a matrix (N, K) as stored: indices, numbers of outliers, float16 codebooks."""
        rows, columns = shape
        few, length = self.num_outliers(columns), self.outlier_length
        of_residual = index_bits(self.residual) if self.residual else 0
        indices = rows // self.length * (columns - few) * (index_bits(self.size) + of_residual)
        books = 16 * self.length * (self.size + self.residual)
        if few:
            indices += rows // length * few * index_bits(self.outlier_size) + 32 * few
            books += 16 * length * self.outlier_size
        return (indices + books) / (rows * columns)


def index_bits(size: int) -> int:
    """Return the bits of a number of one of the `size` vectors of a codebook."""
    return max(1, math.ceil(math.log2(size)))


@dataclass(frozen=True)
class Encoded:
    """A weight (N, K) as indices into codebooks."""

    indices_VK: Tensor
    """int32, for the columns that are no outliers, in their order."""
    codebook_CL: Tensor
    residual_VK: Tensor | None = None
    residual_CL: Tensor | None = None
    outliers_O: Tensor | None = None
    """Numbers of the columns that have a codebook of their own, ascending, int32."""
    outlier_VO: Tensor | None = None
    outlier_CL: Tensor | None = None

    @property
    def num_columns(self) -> int:
        """Return K."""
        return self.indices_VK.shape[1] + (0 if self.outliers_O is None else len(self.outliers_O))

    def decode(self, *, order_K: Tensor | None = None) -> Tensor:
        """Return the weights (N, K), float32.

        Args:
            order_K: `column_order`, where it is ready on the device; it is computed on the host.
        """
        values_KVL = self.codebook_CL[self.indices_VK.t().long()]
        if self.residual_VK is not None and self.residual_CL is not None:
            values_KVL = values_KVL + self.residual_CL[self.residual_VK.t().long()]
        plain_KN = values_KVL.flatten(1)
        if self.outliers_O is None or self.outlier_VO is None or self.outlier_CL is None:
            return plain_KN.t().contiguous()
        few_ON = self.outlier_CL[self.outlier_VO.t().long()].flatten(1)
        order_K = column_order(self.outliers_O, self.num_columns) if order_K is None else order_K
        return torch.cat([plain_KN, few_ON])[order_K].t().contiguous()


def column_order(outliers_O: Tensor, columns: int) -> Tensor:
    """Return for each column (K,) its place among the plain columns followed by the outliers."""
    is_outlier_K = torch.zeros(columns, dtype=torch.bool)
    is_outlier_K[outliers_O.long()] = True
    apart_K = torch.cat([(~is_outlier_K).nonzero()[:, 0], is_outlier_K.nonzero()[:, 0]])
    order_K = torch.empty_like(apart_K)
    order_K[apart_K] = torch.arange(columns)
    return order_K


def encoded(weight_NK: Tensor, hessian_KK: Tensor, how: Vectors, *, seed: int) -> Encoded:
    """Encode a weight on the host.

    Args:
        weight_NK: float32; N is a multiple of the vectors' length.
        hessian_KK: mean of x x^T over the layer's inputs.
        seed: of the samples that k-means starts from.
    """
    generator = torch.Generator().manual_seed(seed)
    weight_NK = weight_NK.to(torch.float32)
    rows, columns = weight_NK.shape
    importance_K = hessian_KK.diagonal().to(torch.float32).clamp(min=1e-12)
    few = how.num_outliers(columns)
    outliers_O = torch.argsort(importance_K, descending=True, stable=True)[:few].sort().values
    is_outlier_K = torch.zeros(columns, dtype=torch.bool)
    is_outlier_K[outliers_O] = True

    def book_of(values_NM: Tensor, length: int, size: int, importance_M: Tensor) -> Tensor:
        points = values_NM.t().reshape(-1, length)
        weights = importance_M.repeat_interleave(rows // length)
        return codebook(points, weights, size=size, generator=generator)

    plain_NM, importance_M = weight_NK[:, ~is_outlier_K], importance_K[~is_outlier_K]
    first_CL = book_of(plain_NM, how.length, how.size, importance_M)
    second_CL = own_CL = None
    if how.residual:
        points = plain_NM.t().reshape(-1, how.length)
        left = (points - first_CL[nearest(points, first_CL)]).reshape(plain_NM.shape[1], rows).t()
        second_CL = book_of(left, how.length, how.residual, importance_M)
    if few:
        own_CL = book_of(weight_NK[:, is_outlier_K], how.outlier_length, how.outlier_size, importance_K[is_outlier_K])

    found: dict[int, tuple[Tensor, Tensor | None]] = {}
    feedback = Feedback(hessian_KK)

    def stored(values_N: Tensor, number: int) -> Tensor:
        column = int(feedback.order[number])
        book = own_CL if is_outlier_K[column] and own_CL is not None else first_CL
        points = values_N.reshape(-1, book.shape[1])
        chosen, rest = nearest(points, book), None
        values = book[chosen]
        if book is first_CL and second_CL is not None:
            rest = nearest(points - values, second_CL)
            values = values + second_CL[rest]
        found[column] = (chosen, rest)
        return values.flatten()

    feedback.quantised(weight_NK, stored)
    plain = [column for column in range(columns) if not is_outlier_K[column]]
    return Encoded(
        indices_VK=torch.stack([found[c][0] for c in plain], 1).to(torch.int32),
        codebook_CL=first_CL,
        residual_VK=None if second_CL is None else _stack([found[c][1] for c in plain]),
        residual_CL=second_CL,
        outliers_O=outliers_O.to(torch.int32) if few else None,
        outlier_VO=_stack([found[int(c)][0] for c in outliers_O]) if few else None,
        outlier_CL=own_CL,
    )


def _stack(columns: list[Tensor | None]) -> Tensor:
    return torch.stack([c for c in columns if c is not None], 1).to(torch.int32)


def codebook(points_PL: Tensor, weights_P: Tensor, *, size: int, generator: torch.Generator) -> Tensor:
    """Return `size` centroids (C, L) of weighted points by Lloyd's k-means, rounded to float16 as they are stored.

    It starts from points drawn by weight, and gives an empty cluster the point of the largest weighted error.
    """
    if len(points_PL) > MAX_POINTS:
        some = torch.randperm(len(points_PL), generator=generator)[:MAX_POINTS]
        points_PL, weights_P = points_PL[some], weights_P[some]
    drawn = torch.multinomial(weights_P, min(size, len(points_PL)), generator=generator)
    book_CL = points_PL[drawn].clone()
    for _ in range(ROUNDS):
        chosen_P = nearest(points_PL, book_CL)
        mass_C = torch.zeros(len(book_CL)).index_add_(0, chosen_P, weights_P)
        sums_CL = torch.zeros_like(book_CL).index_add_(0, chosen_P, points_PL * weights_P[:, None])
        is_empty_C = mass_C == 0
        book_CL = torch.where(is_empty_C[:, None], book_CL, sums_CL / mass_C.clamp(min=1e-30)[:, None])
        if num_empty := int(is_empty_C.sum()):
            error_P = (points_PL - book_CL[chosen_P]).square().sum(1) * weights_P
            book_CL[is_empty_C] = points_PL[error_P.topk(num_empty).indices]
    return book_CL.to(torch.float16).to(torch.float32)


def nearest(points_PL: Tensor, book_CL: Tensor) -> Tensor:
    """Return the number (P,) of the nearest vector of a codebook for every point."""
    norms_C = book_CL.square().sum(1) / 2
    rows = max(1, CHUNK // len(book_CL))
    return torch.cat([torch.addmm(norms_C, some, book_CL.t(), alpha=-1).argmin(1) for some in points_PL.split(rows)])
