"""Low-rank quantisation-aware training (LR-QAT, arXiv 2406.06385): adapters that decide how frozen weights are rounded.

A layer computes with s clip(round(Phi0 + scale B A), -2^(b-1), 2^(b-1) - 1). Phi0 = clip(W / s0) is frozen, in fixed
point of 8 bits (b of them before the point), one byte a weight. s0 has the least L4 error of W's rows or groups; s
starts there and is trained. Gradients go through the rounding as though it were the identity, and not where the clip is
at work. Since Phi0 does not follow s, the gradient of s is that of its codes, without the second term of LSQ (arXiv
1902.08153). What is trained folds into integers of b bits, without an adapter (`fold`).
Legend: N output features, K input features, R ranks, G groups of a row, S shards of a batch's rows."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tpu_experiments.config.model_schema import ModelConfig
from tpu_experiments.models.adapters.linear import LoraLinear
from tpu_experiments.quantisation.grid import Grid, over_columns
from tpu_experiments.runtime.stacked import ADAPTER_PARTS

A, B, *_ = ADAPTER_PARTS

STORED_BITS = 8
"""Bits of an entry of Phi0."""
EXPONENT = 4.0
"""Power of the error in the search for s0, of the authors' runs (`LP_p4`)."""
CHUNK = 2**22
"""Weights that are searched for their scales at once: bounds the memory for it to 100 MB."""
LEAST_CODE, GREATEST_CODE = -128, 127
"""Codes of an input of 8 bits."""
SMALLEST_STEP = 1e-8
"""Lower bound of the step between two codes of an input, for tokens of zeros."""


def grid_of(model: ModelConfig) -> Grid | None:
    """Return the integers that adapted weights are rounded to; None where they are not."""
    return Grid(model.linear_bits, model.linear_group, EXPONENT) if model.linear == "lr_qat" else None


# ---- weights ------------------------------------------------------------------------------------------------


def fixed_point(weight_NK: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return Phi0 (N, K) int8 and s0 (N, G) float32 of a weight on the host; of one on the meta device, empty ones."""
    rows, columns = weight_NK.shape
    phi_NK = torch.empty(rows, columns, dtype=torch.int8, device=weight_NK.device)
    scales_NG = torch.empty(rows, columns // grid.columns_of(columns), device=weight_NK.device)
    if weight_NK.is_meta:
        return phi_NK, scales_NG
    count = max(1, CHUNK // columns)
    for some, phi, scales in zip(weight_NK.split(count), phi_NK.split(count), scales_NG.split(count), strict=True):
        values = some.to(torch.float32)
        scales.copy_(grid.scales(values))
        clipped = (values / over_columns(scales, columns)).clamp(grid.lowest, grid.greatest)
        phi.copy_(torch.round(clipped * _parts(grid)))
    return phi_NK, scales_NG


def _parts(grid: Grid) -> int:
    """Return the number of values of Phi0 from one integer to the next."""
    return int(2 ** (STORED_BITS - grid.bits))


def _rounded(phi_NK: Tensor, a_RK: Tensor, b_NR: Tensor, *, grid: Grid, scale: float, dtype: torch.dtype) -> Tensor:
    """Return round(Phi0 + scale B A), float32 and not clipped.

    A and B are rounded to `dtype` before, as a TPU does with the factors of a product in any case.
    """
    product_NK = b_NR.to(dtype).to(torch.float32) @ a_RK.to(dtype).to(torch.float32)
    return torch.round(phi_NK.to(torch.float32) * (1 / _parts(grid)) + scale * product_NK)


def fold(phi_NK: Tensor, a_RK: Tensor, b_NR: Tensor, *, grid: Grid, scale: float, dtype: torch.dtype) -> Tensor:
    """Return the integers (N, K), int8, that a trained layer computes with.

    Args:
        dtype: in which the layer computed in training.
    """
    rounded_NK = _rounded(phi_NK, a_RK.detach(), b_NR.detach(), grid=grid, scale=scale, dtype=dtype)
    return rounded_NK.clamp(grid.lowest, grid.greatest).to(torch.int8)


def decoded(codes_NK: Tensor, scales_NG: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return s times the codes, rounded once to `dtype`."""
    columns = codes_NK.shape[1]
    scales = scales_NG if scales_NG.shape[1] == 1 else over_columns(scales_NG, columns)
    return (codes_NK.to(torch.float32) * scales).to(dtype)


# ---- products -----------------------------------------------------------------------------------------------


def rounded_product(
    x: Tensor,
    phi_NK: Tensor,
    a_RK: Tensor,
    b_NR: Tensor,
    scales_NG: Tensor,
    *,
    grid: Grid,
    scale: float,
    shards: int = 1,
) -> Tensor:
    """Multiply (rows, ..., K) by the rounded weight (N, K), in the data type of `x`.

    The backward pass computes the weight again: nothing of its size is kept.

    Args:
        shards: parts that the rows are split into over devices. The gradient of the weight stays apart for each, so
            that devices exchange those of A, B and the scales, and not one of the weight's size.
    """
    out: Tensor = _Product.apply(x, phi_NK, a_RK, b_NR, scales_NG, grid, scale, shards)
    return out


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        phi_NK: Tensor,
        a_RK: Tensor,
        b_NR: Tensor,
        scales_NG: Tensor,
        grid: Grid,
        scale: float,
        shards: int,
    ) -> Tensor:
        ctx.save_for_backward(x, phi_NK, a_RK, b_NR, scales_NG)
        ctx.grid, ctx.scale, ctx.shards = grid, scale, shards if x.shape[0] % shards == 0 else 1
        codes_NK = _rounded(phi_NK, a_RK, b_NR, grid=grid, scale=scale, dtype=x.dtype).clamp(grid.lowest, grid.greatest)
        return F.linear(x, decoded(codes_NK, scales_NG, dtype=x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, phi_NK, a_RK, b_NR, scales_NG = ctx.saved_tensors
        grid, scale = ctx.grid, ctx.scale
        rounded_NK = _rounded(phi_NK, a_RK, b_NR, grid=grid, scale=scale, dtype=x.dtype)
        codes_NK = rounded_NK.clamp(grid.lowest, grid.greatest)
        of_x = grad @ decoded(codes_NK, scales_NG, dtype=x.dtype) if ctx.needs_input_grad[0] else None
        rows, inputs = (t.reshape(ctx.shards, -1, t.shape[-1]).to(torch.float32) for t in (grad, x))
        of_weight_SNK = rows.transpose(1, 2) @ inputs
        of_scales_NG = (of_weight_SNK * codes_NK).reshape(ctx.shards, *scales_NG.shape, -1).sum((0, -1))
        passed_SNK = torch.where(codes_NK == rounded_NK, of_weight_SNK, 0.0)
        passed_SNK = passed_SNK * (scale * over_columns(scales_NG, phi_NK.shape[1]))
        of_a = (b_NR.to(x.dtype).to(torch.float32).T @ passed_SNK).sum(0)
        of_b = (passed_SNK @ a_RK.to(x.dtype).to(torch.float32).T).sum(0)
        return of_x, None, of_a, of_b, of_scales_NG, None, None, None


def input_settings(model: ModelConfig) -> dict[str, Any] | None:
    """Return how adapted layers round their inputs, in compressed-tensors' words; None where they do not."""
    if model.linear != "lr_qat" or model.linear_activations != "int8":
        return None
    return {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "token", "dynamic": True}


def rounded_tokens(x: Tensor) -> Tensor:
    """Round each token's features (..., K) to 8 bits between its least and its greatest value, and zero.

    The gradient is that of the identity. Codes are compressed-tensors' of dynamic asymmetric integers, bit for bit in
    float32 on a CPU (`input_settings`).
    """
    rounded: Tensor = _RoundedTokens.apply(x)
    return rounded


class _RoundedTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        values = x.to(torch.float32)
        least, most = values.amin(-1, keepdim=True).clamp(max=0.0), values.amax(-1, keepdim=True).clamp(min=0.0)
        step = ((most - least) / (GREATEST_CODE - LEAST_CODE)).clamp(min=SMALLEST_STEP)
        zero = torch.round((LEAST_CODE - least / step).clamp(LEAST_CODE, GREATEST_CODE))
        codes = torch.round((values / step + zero).clamp(LEAST_CODE, GREATEST_CODE))
        return ((codes - zero) * step).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
        return (grad,)


class RoundedLinear(LoraLinear):
    """A Linear with a frozen weight in fixed point, whose adapter decides how it is rounded.

    Parameters are Phi0 as `weight`, `lora_A`, `lora_B`, the trained scales, and the bias.
    """

    is_formula = False
    row_shards = 1
    """Parts that the rows of a batch are split into inside one program."""
    is_folded = False
    """Whether `weight` holds integers that include the adapter, which is then none."""

    def __init__(self, linear: nn.Linear, *, r: int, scale: float, grid: Grid, rounds_inputs: bool, name: str) -> None:
        """Wrap `linear`; `rounds_inputs` says whether tokens are rounded to 8 bits before the product."""
        super().__init__(linear, r=r, scale=scale, dropout=0.0, name=name)
        self.grid, self.bits, self.group, self.rounds_inputs = grid, grid.bits, grid.group, rounds_inputs
        device, groups = linear.weight.device, self.in_features // grid.columns_of(self.in_features)
        stored = torch.empty(self.out_features, self.in_features, dtype=torch.int8, device=device)
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.lora_weight_scale = nn.Parameter(torch.empty(self.out_features, groups, device=device))

    def fold(self) -> None:
        """Compute with integers from now on, which `weight` will be given; A and B are dropped."""
        self.is_folded = True
        self.register_parameter(A, None)
        self.register_parameter(B, None)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features), in the data type of `x`."""
        x = rounded_tokens(x) if self.rounds_inputs else x
        scales = self.lora_weight_scale
        if self.is_folded:
            out = F.linear(x, decoded(self.weight, scales, dtype=x.dtype))
        else:
            out = rounded_product(
                x,
                self.weight,
                self.lora_A,
                self.lora_B,
                scales,
                grid=self.grid,
                scale=self.scale,
                shards=self.row_shards,
            )
        return out if self.bias is None else out + self.bias.to(out.dtype)
