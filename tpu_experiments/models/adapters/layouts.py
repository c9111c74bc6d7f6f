"""Adapters of weights that are stored otherwise, and the formula in fewer passes over memory where that pays."""

import math

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from tpu_experiments.models.adapters.linear import Linear, LoraLinear, multiplied, put_in_place
from tpu_experiments.models.adapters.quantised import Format, QuantLinear, frozen_product, parts_of
from tpu_experiments.models.parts.contracted import forked, into_heads, out_of_heads, together
from tpu_experiments.models.parts.named import LOW, named
from tpu_experiments.runtime.dynamic_type import XLA_DEVICES

TOGETHER_RATIO, TOGETHER_TOKENS = 2, 4
"""Features of the wide side, and tokens, per feature of the narrow side from which the products of a frozen weight and
of its adapter that write the wide side are one."""


class TransposedLora(LoraLinear):
    """An adapter of GPT-2's Conv1D, a Linear whose weight is (in, out)."""

    is_transposed, is_formula = True, False

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return W (N, K)."""
        return self.weight.t()


class QuantisedLora(LoraLinear):
    """An adapter of a weight that is stored as codes and scales."""

    is_formula = False

    def __init__(self, linear: Linear, *, r: int, scale: float, dropout: float, name: str = "") -> None:
        """Wrap a `QuantLinear`."""
        super().__init__(linear, r=r, scale=scale, dropout=dropout, name=name)
        assert isinstance(linear, QuantLinear)
        self.format: Format = linear.format

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return W (N, K), decoded."""
        return self.format.decode(parts_of(self), dtype=dtype)

    def frozen(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return what the layer computes without its adapter, in products that keep no decoded weight."""
        return frozen_product(x, parts_of(self), format=self.format, bias=bias)


class WideLora(LoraLinear):
    """An adapter of a matrix with far more inputs than outputs or the reverse, computed with it where tokens are many.

    Tokens are those of one of the `row_shards` parts that the rows of a batch are split into inside one program.
    """

    row_shards = 1

    def pays_together(self, x: Tensor, *, narrow: int, wide: int) -> bool:
        """Return whether a program of XLA's gains by it; a pack's adapters stay apart."""
        many = math.prod(x.shape[:-1]) >= TOGETHER_TOKENS * narrow * self.row_shards
        return wide >= TOGETHER_RATIO * narrow and many and self.lora_B.ndim == 2 and x.device.type in XLA_DEVICES


class OneProduct(WideLora):
    """An adapter whose B is multiplied together with the frozen weight, which costs copies of both operands.

    That pays where outputs, and the tokens of a chip, are many: the MLP of a layer of Qwen2.5 0.5B, forward and
    backward for 8,192 tokens on v6e, takes 2,412 instead of 2,743 us (tests/benchmarks/RESULTS.md).
    """

    def pays(self, x: Tensor) -> bool:
        """Return whether W and B are multiplied together."""
        return self.pays_together(x, narrow=self.in_features, wide=self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features), in the data type of `x`."""
        if not self.pays(x):
            return super().forward(x)
        joined, first = self.siblings.joined(self, x)
        out = together(joined, self.matrix(x.dtype), self.lora_B, first=first)
        return out if self.bias is None else out + self.bias


class OneGradient(WideLora):
    """An adapter through whose A, and the frozen weight, the gradients of x are one product.

    That pays where inputs, and the tokens of a chip, are many: a step of Gemma 3 270M on v5e takes 0.997 instead of
    1.020 s (planned). Dropout, which only A's inputs have, keeps them apart, and so do others that read the tensor.
    """

    def pays(self, x: Tensor) -> bool:
        """Return whether the gradients are one product."""
        is_alone = len(self.siblings.members) == 1 and not (self.dropout and self.training)
        return is_alone and self.pays_together(x, narrow=self.out_features, wide=self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features), in the data type of `x`."""
        if not self.pays(x):
            return super().forward(x)
        out, low = forked(x, self.matrix(x.dtype), self.lora_A * self.scale)
        out = out + multiplied(named(low, LOW), self.lora_B)
        return out if self.bias is None else out + self.bias


class LoraOfInputHeads(LoraLinear):
    """An adapter of o_proj, whose inputs are heads as attention's kernel writes them."""

    is_formula = False

    def __init__(self, plain: LoraLinear, *, heads: int) -> None:
        """Take the place of `plain`."""
        put_in_place(self, plain)
        self.input_heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features), in the data type of `x`."""
        return super().forward(x.unflatten(-1, (self.input_heads, -1)))

    def frozen(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return what the layer computes without its adapter, from (..., heads, features of a head)."""
        return out_of_heads(x, self.weight, bias)

    def low_rank(self, x: Tensor, a: Tensor) -> Tensor:
        """Multiply `a` (k, in_features) with heads after dropout, and scale: (..., k)."""
        return named(out_of_heads(self.dropped(x, feature_dims=2), a * self.scale), LOW)


class LoraOfOutputHeads(LoraLinear):
    """An adapter of q_proj, k_proj or v_proj, whose outputs are heads as attention's kernel reads them."""

    is_formula = False
    names_its_products = True

    def __init__(self, plain: LoraLinear, *, heads: int) -> None:
        """Take the place of `plain`."""
        put_in_place(self, plain)
        self.output_heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features), in the data type of `x`."""
        low = self.siblings.low_rank(self, x)
        out = into_heads(x, self.weight, self.bias, heads=self.output_heads)
        return named(out + into_heads(low, self.lora_B, heads=self.output_heads), self.leaf).flatten(-2)


def layout_of(linear: Linear) -> type[LoraLinear]:
    """Return the class of an adapter, by how its weight is stored and which side of it is wide."""
    if isinstance(linear, Conv1D):
        return TransposedLora
    if isinstance(linear, QuantLinear):
        return QuantisedLora
    if linear.out_features >= TOGETHER_RATIO * linear.in_features:
        return OneProduct
    return OneGradient if linear.in_features >= TOGETHER_RATIO * linear.out_features else LoraLinear
