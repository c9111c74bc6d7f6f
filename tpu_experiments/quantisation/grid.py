"""Weights rounded to a grid of integers: each by itself (RTN), or with its error made good by later columns (GPTQ).

Sources: GPTQ (arXiv 2210.17323); the search for scales is that of its code (`mse`), an exponent of 2.4 over shrunken
ranges. Groups are consecutive columns; their scales are set before any column is rounded, so that columns may be taken
in the order of their importance while the groups stay in the order of the file (llm-compressor's `actorder: static`).
Legend: N output features, K input features, G groups of a row."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
"""Columns whose errors are sent on together: the rest of the matrix is read once for each block."""
DAMPING = 0.01
"""Part of the mean of the Hessian's diagonal that is added to it; GPTQ's and AutoGPTQ's value."""
EXPONENT = 2.4
"""Of the error that a search for scales takes the sum of; GPTQ's code has this one."""
SHRINKS = tuple(1 - 0.01 * step for step in range(0, 60, 3))
"""Parts of the largest magnitude that are tried as a group's range."""


Nearest = Callable[[Tensor, int], Tensor]
"""Maps the weights (N,) of a column, and its number in the order of importance, to what they are stored as."""


@dataclass(frozen=True)
class Grid:
    """Symmetric integers of some bits with one scale for each group of a row."""

    bits: int
    group: int
    """Columns of a group; 0: a whole row."""
    exponent: float = EXPONENT
    """Power of a weight's error in the search for scales."""

    @property
    def lowest(self) -> int:
        """The least code; the greatest is one less than its opposite."""
        return -(2 ** (self.bits - 1))

    @property
    def greatest(self) -> int:
        """The greatest code."""
        return -self.lowest - 1

    def columns_of(self, columns: int) -> int:
        """Return the columns of a group of a weight with this many."""
        return self.group or columns

    def scales(self, weight_NK: Tensor, *, importance_K: Tensor | None = None) -> Tensor:
        """Return the scales (N, G), float32, with the least error over the shrunken ranges.

        Args:
            importance_K: weights of the columns' errors; all equal if None.
        """
        rows, columns = weight_NK.shape
        group = self.columns_of(columns)
        groups_NGC = weight_NK.reshape(rows, columns // group, group)
        full_NG = groups_NGC.abs().amax(-1).clamp(min=1e-12) / (2 ** (self.bits - 1) - 0.5)
        weights_GC = torch.ones(columns) if importance_K is None else importance_K
        weights_GC = weights_GC.reshape(-1, group)
        best_NG, least_NG = full_NG.clone(), torch.full_like(full_NG, torch.inf)
        for shrink in SHRINKS:
            tried_NG = full_NG * shrink
            error_NGC = (self._round(groups_NGC, tried_NG[..., None]) - groups_NGC).abs_().pow_(self.exponent)
            error_NG = (error_NGC * weights_GC).sum(-1)
            is_better = error_NG < least_NG
            best_NG, least_NG = torch.where(is_better, tried_NG, best_NG), torch.where(is_better, error_NG, least_NG)
        return best_NG

    def codes(self, weight_NK: Tensor, scales_NG: Tensor) -> Tensor:
        """Return the nearest codes (N, K), int8."""
        scales_NK = over_columns(scales_NG, weight_NK.shape[1])
        return torch.round(weight_NK / scales_NK).clamp_(self.lowest, self.greatest).to(torch.int8)

    def decode(self, codes_NK: Tensor, scales_NG: Tensor) -> Tensor:
        """Return the weights (N, K), float32, that codes and scales stand for."""
        return codes_NK.to(torch.float32) * over_columns(scales_NG, codes_NK.shape[1])

    def _round(self, weight: Tensor, scale: Tensor) -> Tensor:
        return torch.round(weight / scale).clamp_(self.lowest, self.greatest) * scale


def over_columns(scales_NG: Tensor, columns: int) -> Tensor:
    """Return the scale of every column, (N, K), of scales of equal groups of consecutive columns (N, G)."""
    rows, groups = scales_NG.shape
    return scales_NG[..., None].expand(rows, groups, columns // groups).reshape(rows, columns)


def rounded(weight_NK: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Round every weight to its nearest code; return codes (N, K) int8 and scales (N, G)."""
    scales_NG = grid.scales(weight_NK)
    return grid.codes(weight_NK, scales_NG), scales_NG


def with_feedback(weight_NK: Tensor, hessian_KK: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Round column by column, moving the later ones against the error in the layer's output (GPTQ).

    Args:
        hessian_KK: mean of x x^T over the layer's inputs, float32.

    Returns:
        Codes (N, K) int8 and scales (N, G).
    """
    factor = Feedback(hessian_KK)
    scales_NG = grid.scales(weight_NK, importance_K=hessian_KK.diagonal())
    scales_NK = over_columns(scales_NG, weight_NK.shape[1])[:, factor.order]

    def nearest(values_N: Tensor, column: int) -> Tensor:
        return grid._round(values_N, scales_NK[:, column])

    decoded_NK = factor.quantised(weight_NK, nearest)
    return grid.codes(decoded_NK, scales_NG), scales_NG


class Feedback:
    """Columns in descending order of the Hessian's diagonal, and how an error in one moves those after it.

    The rows of the upper Cholesky factor of the inverse are what each column sends on, over its diagonal (GPTQ,
    section 3.3). Columns whose inputs are always zero get 1 on the diagonal, and move no other.
    """

    def __init__(self, hessian_KK: Tensor, *, damping: float = DAMPING) -> None:
        hessian_KK = hessian_KK.to(torch.float64)
        diagonal_K = hessian_KK.diagonal().clone()
        self.order = torch.argsort(diagonal_K, descending=True, stable=True)
        diagonal_K[diagonal_K <= 0] = 1.0
        damped_KK = hessian_KK.clone()
        damped_KK.diagonal().copy_(diagonal_K + damping * diagonal_K.mean())
        damped_KK = damped_KK[self.order][:, self.order]
        inverse_KK = torch.cholesky_inverse(torch.linalg.cholesky(damped_KK))
        self.upper_KK = torch.linalg.cholesky(inverse_KK, upper=True).to(torch.float32)

    def quantised(self, weight_NK: Tensor, nearest: Nearest) -> Tensor:
        """Return the weights (N, K) that `nearest` gives for each column in turn, in the order of `weight_NK`."""
        left_NK = weight_NK.to(torch.float32)[:, self.order].clone()
        found_NK = torch.empty_like(left_NK)
        columns = left_NK.shape[1]
        for start in range(0, columns, BLOCK):
            stop = min(start + BLOCK, columns)
            block_NB, upper_BB = left_NK[:, start:stop], self.upper_KK[start:stop, start:stop]
            errors_NB = torch.empty_like(block_NB)
            for b in range(stop - start):
                found_NK[:, start + b] = nearest(block_NB[:, b], start + b)
                errors_NB[:, b] = (block_NB[:, b] - found_NK[:, start + b]) / upper_BB[b, b]
                block_NB[:, b:] -= errors_NB[:, b, None] * upper_BB[b, b:]
            left_NK[:, stop:] -= errors_NB @ self.upper_KK[start:stop, stop:]
        back = torch.empty_like(self.order)
        back[self.order] = torch.arange(columns)
        return found_NK[:, back]


def proxy_error(weight_NK: Tensor, decoded_NK: Tensor, hessian_KK: Tensor) -> float:
    """Return tr(D H D^T) / tr(W H W^T) of D = W - decoded: the part of the layer's output that is lost."""
    difference_NK = (weight_NK - decoded_NK).to(torch.float64)
    hessian_KK, weight_NK = hessian_KK.to(torch.float64), weight_NK.to(torch.float64)
    lost = ((difference_NK @ hessian_KK) * difference_NK).sum()
    return float(lost / ((weight_NK @ hessian_KK) * weight_NK).sum())
