"""Weight decomposition (DoRA, arXiv 2402.09353): W + scale B A with rows of trained length m.

W' = m (W + scale B A) / |W + scale B A|, the norm being that of the row of each output feature. Gradients take it for a
constant (section 4.3). Norms and products with m are float32; no matrix of W's shape is kept for the backward pass.
Legend: N output features, K input features, R ranks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from tpu_experiments.models.adapters.layouts import QuantisedLora, TransposedLora
from tpu_experiments.models.adapters.linear import Linear, LoraLinear
from tpu_experiments.models.adapters.quantised import QuantLinear
from tpu_experiments.models.parts.float32_gradients import product
from tpu_experiments.models.parts.named import LOW, named

SMALLEST = 1e-24
"""Lower bound of a squared norm, for rows of zeros."""


def row_norms(weight_NK: Tensor, a_RK: Tensor, b_NR: Tensor, *, scale: float) -> Tensor:
    """Return the norms (N,) of the rows of W + scale B A, in float32 and without gradient.

    A and B are rounded to the data type of W, as the products with them do. The sum of both matrices is not formed:
    |w + s b A|^2 = |w|^2 + 2 s (w A^T) . b + s^2 b A A^T . b for a row w of W and b of B.
    """
    weight_NK = weight_NK.detach()
    a_RK, b_NR = (t.detach().to(weight_NK.dtype) for t in (a_RK, b_NR))
    crossed_NR = F.linear(weight_NK, a_RK).to(torch.float32)
    a_RK, b_NR = a_RK.to(torch.float32), b_NR.to(torch.float32)
    added_N = ((2 * crossed_NR + scale * (b_NR @ (a_RK @ a_RK.T))) * b_NR).sum(1) * scale
    return (weight_NK.to(torch.float32).square().sum(1) + added_N).clamp(min=SMALLEST).sqrt()


def with_length(out: Tensor, magnitude_N: Tensor, norm_N: Tensor | None, bias: Tensor | None) -> Tensor:
    """Multiply outputs (..., N) by m / norm and add the bias, in float32; the result has the data type of `out`.

    Args:
        norm_N: the norms; None where `magnitude_N` was divided by them before.
    """
    factor_N = magnitude_N.to(torch.float32) if norm_N is None else magnitude_N / norm_N
    scaled: Tensor = _Scaled.apply(out, factor_N, bias)
    return scaled


class _Scaled(Function):
    """Saves the outputs in their own data type and sums the factor's gradient over tokens in float32."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, factor_N: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(out, factor_N)
        scaled = out.to(torch.float32) * factor_N
        return (scaled if bias is None else scaled + bias.to(torch.float32)).to(out.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, factor_N = ctx.saved_tensors
        full = grad.to(torch.float32)
        of_out = (full * factor_N).to(grad.dtype) if ctx.needs_input_grad[0] else None
        of_factor = (full * out.to(torch.float32)).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return of_out, of_factor, None


class DoraLinear(LoraLinear):
    """An adapter whose W + scale B A has rows of trained lengths, `lora_magnitude_vector`."""

    is_formula = False
    names_its_products = True
    is_divided = False

    def __init__(self, linear: Linear, *, r: int, scale: float, dropout: float, name: str = "") -> None:
        """Wrap `linear`."""
        super().__init__(linear, r=r, scale=scale, dropout=dropout, name=name)
        lengths = torch.empty(self.out_features, dtype=torch.float32, device=self.weight.device)
        self.lora_magnitude_vector = nn.Parameter(lengths)

    def divide(self) -> None:
        """Take the lengths for divided by the norms of the rows from now on, which frozen weights need once."""
        self.is_divided = True

    def forward(self, x: Tensor) -> Tensor:
        """Return m (W + scale B A) x / |W + scale B A| + bias.

        Dropout is PEFT's: x is W's input as it is for the output without adapter, and dropped where m changes it.
        """
        low = self.siblings.low_rank(self, x)
        kept = self.dropped(x)
        plain = self.frozen(kept, None)
        out = named(plain + product(low, self.lora_B), self.leaf)
        norm = None
        if not self.is_divided:
            norm = named(row_norms(self.matrix(x.dtype), self.lora_A, self.lora_B, scale=self.scale), LOW)
        scaled = with_length(out, self.lora_magnitude_vector, norm, self.bias)
        return scaled if kept is x else scaled + named(self.frozen(x, None) - plain, self.leaf)


class TransposedDora(DoraLinear, TransposedLora):
    """A `DoraLinear` of GPT-2's Conv1D."""


class QuantisedDora(DoraLinear, QuantisedLora):
    """A `DoraLinear` of codes and scales."""


def dora_of(linear: Linear) -> type[DoraLinear]:
    """Return the class of an adapter with lengths, by how its weight is stored."""
    if isinstance(linear, Conv1D):
        return TransposedDora
    return QuantisedDora if isinstance(linear, QuantLinear) else DoraLinear
