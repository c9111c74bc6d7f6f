"""Low-rank adapters from first principles: y = W x + scale * B A x, W frozen (arXiv 2106.09685).

`inject` replaces Linear modules by name; the frozen weight keeps Hugging Face's name. `adapter_weights` draws A and B
(and, for PiSSA, takes them out of W). Shapes: A (r, in), B (out, r), DoRA's lengths of rows (out,), all float32.
Whether training changed anything is told by fingerprints of parameters at their start: a save that turns out to be the
base model is the loudest complaint of TPU users (huggingface/transformers#36004)."""

import copy
import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tpu_experiments.config.errors import ConfigError, suggest
from tpu_experiments.config.model_schema import ALL_LINEAR, LoraConfig, is_target
from tpu_experiments.models.adapters.dora import row_norms, with_length
from tpu_experiments.models.adapters.lost_in_peft import lost_in_peft
from tpu_experiments.models.adapters.low_rank_qat import decoded, fixed_point, fold, rounded_product, rounded_tokens
from tpu_experiments.models.adapters.packed import by_adapter
from tpu_experiments.models.adapters.padded import (
    MIN_FEATURES,
    PADDING,
    below,
    beside,
    joined_with,
    weights_with_adapters,
    with_low,
)
from tpu_experiments.models.adapters.quantised import Format, QuantLinear, frozen_product, parts_of, quantised_shapes
from tpu_experiments.models.parts.contracted import contracted, forked, into_heads, out_of_heads, together
from tpu_experiments.models.parts.dropout import dropped, layer_and_hash, noise_in_use
from tpu_experiments.models.parts.float32_gradients import product
from tpu_experiments.models.parts.named import LOW, Named, named
from tpu_experiments.quantisation.grid import Grid
from tpu_experiments.runtime.dynamic_type import XLA_DEVICES
from tpu_experiments.runtime.stacked import ADAPTER_PARTS, hugging_face_names, is_side_tensor, is_stack, unstacked

A, B, MAGNITUDE, LEARNT_SCALE = ADAPTER_PARTS
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that share one input tensor in most decoders; whether they do is checked at every call."""
TOGETHER_RATIO, TOGETHER_TOKENS = 2, 4
"""Features of the wide side, and tokens, per feature of the narrow side from which the products of a frozen weight and
of its adapter that write the wide side are one."""


Padding = Literal["", "columns", "rows", "both"]
"""What a weight has more of than W, to hold B beside it or A below it (models/adapters/padded.py)."""


class LoraLinear(nn.Module):
    """A frozen Linear with an adapter; parameters of the Linear itself, `lora_A`, `lora_B`, and DoRA's lengths of rows.

    GPT-2's Conv1D is a Linear whose weight is (in, out) (`is_transposed`); a quantised one has codes and scales.
    """

    siblings: "Siblings | None" = None
    weight: nn.Parameter
    bias: nn.Parameter | None
    lora_magnitude_vector: nn.Parameter | None
    is_divided = False
    """Whether DoRA's lengths were divided by the norms of the rows, which frozen weights need once."""
    input_heads = output_heads = 0
    """Heads that the inputs or outputs are, where attention's kernel reads and writes heads first (`work_on_heads`)."""
    row_shards = 1
    """Parts that the rows of a batch are split into inside one program."""
    padding: Padding = ""
    path = ""
    """Where the module is in the model, if its weight is padded: layers that are folded differ in nothing."""
    is_gathered = False
    """Whether the weight is sharded, and its padding filled wherever a loop over layers gathers it."""
    uninitialised_parts: int | None = None
    """Parts that rows are split into where tokens are written in place (`with_low`, adapters/padded.py), or None."""

    def __init__(
        self,
        linear: nn.Linear | Conv1D | QuantLinear,
        *,
        r: int,
        scale: float,
        dropout: float,
        dora: bool = False,
        name: str = "",
    ) -> None:
        """Wrap `linear`; `name` is its path in the model, on which dropout masks depend."""
        super().__init__()
        self.leaf = name.rpartition(".")[2]
        self.layer_idx, self.site = layer_and_hash(name)
        self.is_transposed = isinstance(linear, Conv1D)
        self.in_features, self.out_features = features_of(linear)
        self.scale, self.dropout = scale, dropout
        self.format = linear.format if isinstance(linear, QuantLinear) else None
        for name, own in linear.named_parameters(recurse=False):
            self.register_parameter(name, own)
        if linear.bias is None:
            self.register_parameter("bias", None)
        device: torch.device = self.weight.device
        self.lora_A = nn.Parameter(torch.empty(r, self.in_features, dtype=torch.float32, device=device))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, r, dtype=torch.float32, device=device))
        lengths = nn.Parameter(torch.empty(self.out_features, dtype=torch.float32, device=device)) if dora else None
        self.register_parameter(MAGNITUDE, lengths)

    @property
    def names_its_products(self) -> bool:
        """Whether the module names what a remat policy saves of it, in the place of its output."""
        return self.lora_magnitude_vector is not None or bool(self.output_heads)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features), in the data type of `x`."""
        if self.input_heads:
            x = x.unflatten(-1, (self.input_heads, -1))
        if (weight := weights_with_adapters().get(self.path)) is not None:
            return self._padded_product(x, weight)
        if self._has_one_gradient(x):
            out, low = forked(x, self.frozen_weight, self.lora_A * self.scale)
            out = out + self._product(named(low, LOW), self.lora_B)
            return out if self.bias is None else out + self.bias
        if self._is_one_product(x):
            siblings = self.siblings or Siblings([self])
            joined, first = siblings.joined(self, x)
            out = together(joined, self.frozen_weight, self.lora_B, first=first)
            return out if self.bias is None else out + self.bias
        low = self.siblings.low_rank(self, x) if self.siblings else self.low_rank(x, self.lora_A)
        if self.lora_magnitude_vector is not None:
            return self._with_length(x, low, self.lora_magnitude_vector)
        if self.output_heads:
            return named(self._into_heads(x, low), self.leaf).flatten(-2)
        return self.frozen(x, bias=self.bias) + self._product(low, self.lora_B)

    @property
    def multiplies_heads(self) -> bool:
        """Whether the layer can write or read heads: one whose weight is a matrix as it is stored, without lengths."""
        return (
            type(self) is LoraLinear
            and self.format is None
            and not self.is_transposed
            and self.lora_magnitude_vector is None
        )

    @property
    def is_written(self) -> bool:
        """Whether steps write the adapter into the weight that the device holds."""
        return self.padding != "" and not self.is_gathered

    @property
    def frozen_weight(self) -> Tensor:
        """W (N, K), without padding."""
        return self.weight[..., : self.out_features, : self.in_features] if self.padding else self.weight

    @property
    def family(self) -> list["LoraLinear"]:
        """The adapters that read the same tensor, this one among them."""
        return self.siblings.members if self.siblings else [self]

    def fitting_padding(self, *, in_loop: bool) -> Padding:
        """Choose how the weight is padded to hold the adapter; not at all where that does not pay.

        A step of Mistral 7B on v6e-8, r=32, takes 0.512 instead of 0.545 s with the MLP's weights padded (planned).

        Args:
            in_loop: whether the weight is one of a stack that a loop over layers reads.
        """
        family = self.family
        ranks = sum(member.lora_A.shape[-2] for member in family)
        if ranks > PADDING or any(not m.multiplies_heads or m.input_heads or m.output_heads for m in family):
            return ""
        inputs, outputs = self.in_features, self.out_features
        if len(family) > 1 or outputs >= TOGETHER_RATIO * inputs:
            if inputs < MIN_FEATURES or inputs % PADDING:
                return ""
            narrowest = min(family, key=lambda member: member.out_features)
            # Dropout, which only A's inputs have, keeps gradients apart.
            holds_a = self is narrowest and inputs >= TOGETHER_RATIO * outputs and not in_loop and not self.dropout
            return "both" if holds_a else "columns"
        fits = inputs >= TOGETHER_RATIO * outputs and outputs >= MIN_FEATURES and outputs % PADDING == 0
        return "rows" if fits and not self.dropout else ""

    def pad_weight(self, padding: Padding, path: str, *, is_gathered: bool = False, parts: int | None = None) -> None:
        """Have the weight of the module at this path stored with padding."""
        self.padding, self.path, self.is_gathered, self.uninitialised_parts = padding, path, is_gathered, parts

    def padding_values(
        self, value_of: Callable[["LoraLinear", str], Tensor]
    ) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        """Yield the parts of adapters that the padding holds, and the row and column that each begins at.

        Args:
            value_of: returns the A or B of an adapter of the family.
        """
        dtype = self.weight.dtype
        if self.padding in ("rows", "both"):
            held = torch.cat([value_of(member, A) * member.scale for member in self.family], dim=-2)
            yield held.to(dtype), (self.out_features, 0)
        if self.padding in ("columns", "both"):
            first = self.siblings.first_of(self) if self.siblings else 0
            yield value_of(self, B).to(dtype), (0, self.in_features + first)

    def _padded_product(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.padding == "rows":
            parts, in_loop = self.uninitialised_parts, is_stack(self.path)
            a = self.lora_A * self.scale
            out, low = below(x, weight, a, outputs=self.out_features, parts=parts, in_loop=in_loop)
            out = out + self._product(named(low, LOW), self.lora_B)
        else:
            out = (self.siblings or Siblings([self])).padded(self, x)
        return out if self.bias is None else out + self.bias

    def _into_heads(self, x: Tensor, low: Tensor) -> Tensor:
        """Return (..., heads, features of a head)."""
        out = into_heads(x, self.weight, self.bias, heads=self.output_heads)
        return out + into_heads(low, self.lora_B, heads=self.output_heads)

    def _is_one_product(self, x: Tensor) -> bool:
        """Return whether the frozen weight and B are multiplied together, which costs copies of both operands.

        That pays where outputs, and the tokens of a chip, are many: the MLP of a layer of Qwen2.5 0.5B, forward and
        backward for 8,192 tokens on v6e, takes 2,412 instead of 2,743 us (tests/benchmarks/README.md, Small models).
        """
        return self._pays_together(x, narrow=self.in_features, wide=self.out_features)

    def _has_one_gradient(self, x: Tensor) -> bool:
        """Return whether the gradients of x, through the frozen weight and through A, are one product.

        That pays where inputs, and the tokens of a chip, are many: a step of Gemma 3 270M on v5e takes 0.997 instead of
        1.020 s (planned). Dropout, which only A's inputs have, keeps them apart.
        """
        is_alone = self.siblings is None and not (self.dropout and self.training)
        return is_alone and self._pays_together(x, narrow=self.out_features, wide=self.in_features)

    def _pays_together(self, x: Tensor, *, narrow: int, wide: int) -> bool:
        many = math.prod(x.shape[:-1]) >= TOGETHER_TOKENS * narrow * self.row_shards
        plain = self.format is None and not self.is_transposed and self.lora_B.ndim == 2
        plain = plain and not self.input_heads and not self.output_heads and self.lora_magnitude_vector is None
        return plain and wide >= TOGETHER_RATIO * narrow and many and x.device.type in XLA_DEVICES

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply (..., in) by (out, in); by packed weights (K, out, in), each adapter's rows by its own."""
        if weight.ndim == 2:
            return contracted(x, weight) if x.device.type in XLA_DEVICES else product(x, weight)
        return by_adapter(x, weight, num_shards=self.row_shards)

    def frozen(self, x: Tensor, *, bias: Tensor | None) -> Tensor:
        """Return what the layer computes without its adapter."""
        if self.format is not None:
            return frozen_product(x, parts_of(self), format=self.format, bias=bias)
        if self.input_heads:
            return out_of_heads(x, self.weight, bias)
        if self.padding == "columns" and is_stack(self.path):  # where a loop reads the weight, it has no more rows
            # W alone would be copied out of the stack. What the padding still holds is multiplied by 0.
            return F.linear(F.pad(x, (0, PADDING)), self.weight, bias)
        return F.linear(x, self.weight.t() if self.is_transposed else self.frozen_weight, bias)

    def _with_length(self, x: Tensor, low: Tensor, magnitude: Tensor) -> Tensor:
        """Return m (W + scale B A) x / |W + scale B A| + bias.

        Dropout is PEFT's: x is W's input as it is for the output without adapter, and dropped where m changes it.
        """
        kept = self._dropped(x)
        plain = self.frozen(kept, bias=None)
        out = named(plain + product(low, self.lora_B), self.leaf)
        norm = None if self.is_divided else named(self._row_norms(x.dtype), LOW)
        scaled = with_length(out, magnitude, norm, self.bias)
        return scaled if kept is x else scaled + named(self.frozen(x, bias=None) - plain, self.leaf)

    def _row_norms(self, dtype: torch.dtype) -> Tensor:
        if self.format is not None:
            weight = self.format.decode(parts_of(self), dtype=dtype)
        else:
            weight = self.weight.t() if self.is_transposed else self.weight
        return row_norms(weight, self.lora_A, self.lora_B, scale=self.scale)

    def low_rank(self, x: Tensor, a: Tensor) -> Tensor:
        """Multiply `a` (k, in_features) with `x` after dropout, and scale: (..., k). Remat always saves it."""
        # A is scaled, not the product, which XLA fuses otherwise where a factor other than 1 follows (contracted.py).
        kept, scaled = self._dropped(x), a * self.scale
        return named(out_of_heads(kept, scaled) if self.input_heads else self._product(kept, scaled), LOW)

    def _dropped(self, x: Tensor) -> Tensor:
        """Apply dropout with a mask derived from the row's random word.

        Raises:
            RuntimeError: the batch of this forward pass has no random words.
        """
        if not self.dropout or not self.training:
            return x
        noise = noise_in_use(f"lora.dropout={self.dropout}", off="lora.dropout=0")
        layer, dims = noise.layer_of(self.layer_idx), 2 if self.input_heads else 1
        return dropped(x, noise.words_R, layer=layer, site=self.site, keep=1 - self.dropout, feature_dims=dims)


class RoundedLinear(LoraLinear):
    """A Linear with a frozen weight in fixed point, whose adapter decides how it is rounded (adapters/low_rank_qat.py).

    Parameters are Phi0 as `weight`, `lora_A`, `lora_B`, the trained scales, and the bias.
    """

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


def padded_adapters(module: nn.Module) -> dict[str, LoraLinear]:
    """Return the adapters whose weights are padded to hold them, by their names in the module."""
    return {name: part for name, part in module.named_modules() if isinstance(part, LoraLinear) and part.padding}


def features_of(linear: nn.Linear | Conv1D | QuantLinear) -> tuple[int, int]:
    """Return the input and the output width of a linear layer."""
    if isinstance(linear, Conv1D):
        return linear.nx, linear.nf
    return linear.in_features, linear.out_features


class Siblings:
    """Adapters that read one tensor and multiply it by their A together.

    One product with (A_q; A_k; A_v), one with its gradient and one dropout mask replace three of each, all of which
    read or write every feature of the tensor. A member that is given another tensor than its predecessor computes for
    itself.
    """

    def __init__(self, members: list[LoraLinear]) -> None:
        self.members = members
        self._x: Tensor | None = None
        self._all: Tensor | None = None
        self._joined: Tensor | None = None
        self._lows: dict[int, tuple[Tensor, int]] = {}
        """Values of members that have not read this tensor yet, and the number of their first among all."""
        self._outs: dict[int, Tensor] = {}
        """Products of members that have not read this tensor yet, where weights are padded."""

    def low_rank(self, member: LoraLinear, x: Tensor) -> Tensor:
        """Return the low-rank product of `member` for `x`: (..., in_features) to (..., r)."""
        self._multiply(member, x)
        low, _ = self._lows.pop(id(member), (None, 0))
        self._forget()
        return member.low_rank(x, member.lora_A) if low is None else low

    def joined(self, member: LoraLinear, x: Tensor) -> tuple[Tensor, int]:
        """Return `x` with the values of all members behind it, or of one alone, and the number of its own first."""
        self._multiply(member, x)
        low, first = self._lows.pop(id(member), (None, 0))
        if low is None or self._all is None:
            joined = torch.cat([x, member.low_rank(x, member.lora_A)], dim=-1)
        elif self._joined is None:
            joined = self._joined = torch.cat([x, self._all], dim=-1)
        else:
            joined = self._joined
        self._forget()
        return joined, first

    def padded(self, member: LoraLinear, x: Tensor) -> Tensor:
        """Return the product of `x` with the weight and the adapter of `member`, whose padding holds B."""
        if x is not self._x or id(member) not in self._outs:
            self._outs = dict(zip(map(id, self.members), self._products(x), strict=True))
            self._x, self._lows = x, {}
        out = self._outs.pop(id(member))
        if not self._outs:
            self._x = None
        return out

    def _products(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the products of `x` with all weights, which are padded."""
        first = self.members[0]
        parts, in_loop = first.uninitialised_parts, is_stack(first.path)
        holds_a = any(member.padding == "both" for member in self.members)
        a = torch.cat([member.lora_A for member in self.members], dim=-2)
        source = x.detach() if holds_a else x
        if first.dropout and first.training:
            low = first.low_rank(source, a)
            joined = joined_with(source, low, parts=parts)
        else:
            joined, low = with_low(source, a * first.scale, parts=parts)
        weights = [weights_with_adapters()[member.path] for member in self.members]
        return beside(joined, x, low, weights, [member.lora_B for member in self.members], parts=parts, in_loop=in_loop)

    def first_of(self, member: LoraLinear) -> int:
        """Return the number of the first value of `member` among those of all members."""
        return sum(m.lora_A.shape[-2] for m in itertools.takewhile(lambda m: m is not member, self.members))

    def _multiply(self, member: LoraLinear, x: Tensor) -> None:
        if x is self._x:
            return
        self._x, self._joined, self._outs = x, None, {}
        self._all = member.low_rank(x, torch.cat([m.lora_A for m in self.members], dim=-2))
        ranks = [m.lora_A.shape[-2] for m in self.members]
        lows, firsts = self._all.split(ranks, dim=-1), itertools.accumulate([0, *ranks[:-1]])
        self._lows = {id(m): (low, first) for m, low, first in zip(self.members, lows, firsts, strict=True)}

    def _forget(self) -> None:
        if not self._lows:
            self._x = self._all = self._joined = None


@dataclass(frozen=True)
class ParameterReport:
    """Numbers of trained and of all parameters (tied ones once, adapters included in `total`)."""

    trainable: int
    total: int
    adapters: int

    def __str__(self) -> str:
        share = 100 * self.trainable / self.total
        return f"{self.trainable:,} of {self.total:,} parameters trained ({share:.3f} %), {self.adapters} adapters"


def scale_of(lora: LoraConfig) -> float:
    """Return alpha / r, or alpha / sqrt(r) for rsLoRA."""
    return lora.alpha / (lora.r if lora.scaling == "alpha_over_r" else math.sqrt(lora.r))


def inject(
    module: nn.Module,
    lora: LoraConfig,
    *,
    head: Collection[str] = (),
    grid: Grid | None = None,
    rounds_inputs: bool = False,
) -> ParameterReport:
    """Freeze `module` and give every matching Linear an adapter; `r: 0` leaves every weight trainable.

    Args:
        head: parameters that are trained whole, as those of a classifier's head; their modules get no adapter.
        grid: integers that adapted weights are rounded to (`model.linear=lr_qat`).
        rounds_inputs: whether the inputs of those are rounded to 8 bits.

    Raises:
        ConfigError: a target matches no Linear; the names that exist are listed. Or an adapted weight cannot be
            rounded to the grid.
    """
    linears = {name: part for name, part in module.named_modules() if is_linear(part)}
    if lora.r == 0:
        return report(module, adapters=0)
    module.requires_grad_(False)
    for name in head:
        module.get_parameter(name).requires_grad_(True)
    linears = {name: part for name, part in linears.items() if f"{name}.weight" not in head}
    matched = _matched(linears, lora.targets)
    for name in matched:
        parent, _, leaf = name.rpartition(".")
        linear, scale = linears[name], scale_of(lora)
        if grid is None:
            adapted = LoraLinear(linear, r=lora.r, scale=scale, dropout=lora.dropout, dora=lora.dora, name=name)
        else:
            whole = _require_on_grid(linear, name, grid)
            adapted = RoundedLinear(whole, r=lora.r, scale=scale, grid=grid, rounds_inputs=rounds_inputs, name=name)
        setattr(module.get_submodule(parent), leaf, adapted)
    if grid is not None:
        return report(module, adapters=len(matched))  # they multiply nothing by A alone
    for parent in {name.rpartition(".")[0]: None for name in matched}:
        _link_siblings(module.get_submodule(parent))
    return report(module, adapters=len(matched))


def require_read_by_peft(module: nn.Module, lora: LoraConfig) -> None:
    """Require PEFT to read each adapter as that of its module.

    Raises:
        ConfigError: it would take some for those of experts.
    """
    if not isinstance(module, PreTrainedModel):
        return
    matched = [name.removesuffix(".weight") for name in adapted_weights(module)]
    lost = lost_in_peft(module, matched)
    if lost:
        leaves = sorted({name.rpartition(".")[2] for name in lost})
        kept = sorted({name.rpartition(".")[2] for name in matched} - set(leaves))
        raise ConfigError(
            f"lora.targets=[{','.join(lora.targets)}]; PEFT leaves adapters of {', '.join(leaves)} out when it reads "
            f"those of a {module.config.model_type}, since it takes them for its experts' ({len(lost)} of "
            f"{len(matched)} modules, first {lost[0]}); use lora.targets=[{','.join(kept)}]."
        )


def is_linear(part: nn.Module) -> bool:
    """Return whether a module computes W x, or W x + b, and nothing else.

    Subclasses of Linear may compute something else (PhiMoE's router returns experts and their weights, DeepSeek V4's
    grouped projection), so that each is probed on a few numbers.
    """
    if not isinstance(part, nn.Linear) or type(part) is nn.Linear:
        return isinstance(part, nn.Linear | Conv1D | QuantLinear)
    plain, x = nn.Linear(3, 2, bias=part.bias is not None, device="cpu"), torch.tensor([[[0.5, -2.0, 30.0]]])
    probe = copy.copy(part)
    probe._parameters = dict(plain._parameters)
    try:
        out = probe(x)
    except Exception:  # it needs other shapes or inputs
        return False
    return isinstance(out, Tensor) and out.shape == (1, 1, 2) and torch.allclose(out, plain(x))


def _require_on_grid(linear: nn.Module, name: str, grid: Grid) -> nn.Linear:
    """Return a Linear whose weight can be rounded to the grid.

    Raises:
        ConfigError: it is GPT-2's Conv1D, or a group does not divide its width.
    """
    if type(linear) is not nn.Linear:
        raise ConfigError(
            f"model.linear=lr_qat; {name} is a {type(linear).__name__}, and weights of Linear modules alone are "
            "rounded; leave it out of lora.targets, or use model.linear=plain."
        )
    if linear.in_features % grid.columns_of(linear.in_features):
        raise ConfigError(
            f"model.linear_group={grid.group}; {name} has {linear.in_features} input features, which are no whole "
            "groups; use a divisor of that, or 0 for one scale a row."
        )
    return linear


def _link_siblings(parent: nn.Module) -> None:
    """Link the adapters of one module that may read the same tensor."""
    for names in SAME_INPUT:
        members = [part for part in (getattr(parent, name, None) for name in names) if isinstance(part, LoraLinear)]
        if len(members) > 1 and len({m.in_features for m in members}) == 1:
            siblings = Siblings(members)
            for member in members:
                member.siblings, member.site = siblings, members[0].site


def _matched(linears: Mapping[str, nn.Module], targets: list[str]) -> list[str]:
    names: dict[str, None] = {}
    for target in targets:
        hits = [name for name in linears if is_target(name, target)]
        if not hits:
            leaves = {name.rpartition(".")[2] for name in linears} | {ALL_LINEAR}
            raise ConfigError(
                f"lora.targets has {target!r}, which matches no Linear of the model. {suggest(target, leaves)}"
            )
        names |= dict.fromkeys(hits)
    return [name for name in linears if name in names]


def report(module: nn.Module, *, adapters: int) -> ParameterReport:
    """Count parameters, tied ones once; quantised weights as those that they stand for, their scales not."""
    trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    dense = quantised_shapes(module)
    named = ((name, p) for name, p in module.named_parameters() if not is_side_tensor(name))
    total = sum(math.prod(dense[name]) if name in dense else p.numel() for name, p in named)
    return ParameterReport(trainable, total, adapters)


def adapted_weights(module: nn.Module) -> dict[str, bool]:
    """Return the names of base weights with an adapter; true where the weight is (in, out)."""
    parts = ((name, part) for name, part in module.named_modules() if isinstance(part, LoraLinear))
    return {f"{name}.weight": part.is_transposed for name, part in parts}


def adapter_weights(
    base: Named,
    *,
    lora: LoraConfig,
    seed: int,
    is_transposed: bool = False,
    format: Format | None = None,
    grid: Grid | None = None,
) -> Iterator[Named]:
    """Yield the base weight (for PiSSA reduced by B A), A, B, and with DoRA the lengths of rows.

    With a grid the weight is Phi0, and its scales follow A and B.

    The draw depends on the seed and the parameter's name alone, so it is the same on any number of devices.

    Args:
        is_transposed: the weight is (in, out), as in `adapted_weights`.
        format: of a base that is yielded as codes and scales.
        grid: integers that the weight is rounded to in training.
    """
    prefix = base.name.removesuffix("weight")
    whole = base.tensor.t() if is_transposed else base.tensor
    if lora.init == "pissa":
        weight, a, b = _pissa(whole, r=lora.r, scale=scale_of(lora))
    else:
        weight, (a, b) = whole, _drawn(tuple(whole.shape), name=base.name, lora=lora, seed=seed)
    if grid is not None:
        phi, scales = fixed_point(weight, grid)
        for name, tensor in (("weight", phi), (A, a), (B, b), (LEARNT_SCALE, scales)):
            yield Named(prefix + name, tensor)
        return
    parts = {"weight": weight} if format is None else format.quantise(weight)
    if format is not None and (lora.dora or lora.init == "loftq"):
        weight = format.decode(parts, dtype=weight.dtype)
        if lora.init == "loftq":  # arXiv 2310.08659, one step: the base's codes stay those of W
            a, b = principal(whole.to(torch.float32) - weight, r=lora.r, scale=scale_of(lora))
    for name, tensor in parts.items():
        yield Named(prefix + name, tensor.t().contiguous() if is_transposed else tensor)
    yield Named(prefix + A, a)
    yield Named(prefix + B, b)
    if lora.dora:
        yield Named(prefix + MAGNITUDE, lengths_of_rows(weight, a, b, scale=scale_of(lora)))


def folded_weight(
    base: Named, trained: Mapping[str, Tensor], *, lora: LoraConfig, grid: Grid, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the integers (out, in) int8 of a base weight and their scales: as trained, and as training began.

    Args:
        trained: host tensors of the adapter under Hugging Face's names.
        dtype: in which the model computed in training.
    """
    prefix = base.name.removesuffix("weight")
    a, b, scales = (trained[prefix + part].to(torch.float32) for part in (A, B, LEARNT_SCALE))
    phi, first = fixed_point(base.tensor, grid)
    folded, start = (fold(phi, a, each, grid=grid, scale=scale_of(lora), dtype=dtype) for each in (b, 0 * b))
    return (folded, scales), (start, first)


def _drawn(shape: tuple[int, ...], *, name: str, lora: LoraConfig, seed: int) -> tuple[Tensor, Tensor]:
    """Draw A and B for a weight (out, in); their product is zero."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    if lora.init == "a_zero":
        # standard deviation of A in b_zero, Kaiming-uniform with a = sqrt(5), for B's fan-in r
        b = torch.randn((shape[0], lora.r), generator=generator) / math.sqrt(3 * lora.r)
        return torch.zeros(lora.r, shape[1]), b
    bound = 1 / math.sqrt(shape[1])  # Kaiming-uniform with a = sqrt(5), as nn.Linear
    return torch.empty(lora.r, shape[1]).uniform_(-bound, bound, generator=generator), torch.zeros(shape[0], lora.r)


def drawn_adapters(
    module: nn.Module, names: Sequence[str], *, lora: LoraConfig, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the A and B of `adapter_weights` by their names in a (folded) module, whose own may have another rank.

    The start must depend on shapes alone (`lora.init` b_zero or a_zero).
    """
    for name in names:
        owner, _, part = name.rpartition(".")
        linear = module.get_submodule(owner)
        assert isinstance(linear, LoraLinear)
        shape = (linear.out_features, linear.in_features)
        parts = [
            _drawn(shape, name=f"{each.rpartition('.')[0]}.weight", lora=lora, seed=seed)[part == B]
            for each in hugging_face_names(name)
        ]
        yield name, torch.stack(parts) if is_stack(name) else parts[0]


def lengths_of_rows(weight: Tensor, a: Tensor, b: Tensor, *, scale: float) -> Tensor:
    """Return the norms of the rows of W + scale B A; of a weight on the meta device, an empty tensor."""
    if weight.is_meta:
        return torch.empty(len(weight), device="meta")
    return row_norms(weight, a, b, scale=scale)


def _pissa(weight: Tensor, *, r: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Split W into W - scale B A, A and B by its r largest singular values (PiSSA, arXiv 2404.02948)."""
    full = weight.to(torch.float32)
    a, b = principal(full, r=r, scale=scale)
    return (full - scale * b @ a).to(weight.dtype), a, b


def principal(matrix: Tensor, *, r: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return A and B whose scale B A is the closest matrix of rank r, by the r largest singular values.

    A = sqrt(S_r) V_r^T and B = U_r sqrt(S_r), each divided by sqrt(scale).
    """
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    root = torch.sqrt(s[:r] / scale)
    return root[:, None] * vt[:r], u[:, :r] * root


MAX_ELEMENTS = 2**20
"""Upper bound of the evenly spaced elements that are hashed of a tensor: adapters are hashed whole, and all of a
7-billion-parameter model would be 28 GB to hash."""


def fingerprint(tensor: Tensor) -> str:
    """Return a digest of a host tensor's values as float32."""
    flat = tensor.detach().reshape(-1)
    step = max(1, math.ceil(flat.numel() / MAX_ELEMENTS))
    sample = flat[::step].to(torch.float32).contiguous()
    return hashlib.sha256(sample.numpy().data).hexdigest()


def fingerprints(name: str, tensor: Tensor) -> dict[str, str]:
    """Return fingerprints under Hugging Face's names, one per layer of a stack."""
    return {part: fingerprint(values) for part, values in unstacked({name: tensor}).items()}


def num_changed(tensors: Mapping[str, Tensor], initial: Mapping[str, str]) -> int:
    """Count the tensors whose fingerprint is not that of `initial`."""
    return sum(fingerprint(tensor) != initial[name] for name, tensor in tensors.items())


def effects(tensors: Mapping[str, Tensor], *, start: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the Frobenius norm of B A for every adapted module, without the scale.

    Where `start` has A0 and B0 (PiSSA, LoftQ), it is that of B A - B0 A0. |B A|^2 is the sum of (B^T B) * (A A^T), two
    r x r matrices, so the product itself is never formed. B A - B0 A0 is (B - B0) A + B0 (A - A0), which loses no
    digits where little has changed. Float64 throughout, by numpy: torch's threads wait for each other at every small
    product (14 modules, busy machine: 1.4 s instead of 0.05 s).
    """
    found: dict[str, float] = {}
    for name in tensors:
        module, _, kind = name.rpartition(".")
        if kind != A:
            continue
        a, b = _float64(tensors[name]), _float64(tensors[f"{module}.{B}"])
        if name in start:
            a0, b0 = _float64(start[name]), _float64(start[f"{module}.{B}"])
            a, b = np.concatenate([a, a - a0], axis=0), np.concatenate([b - b0, b0], axis=1)
        found[module] = math.sqrt(max(0.0, float(((b.T @ b) * (a @ a.T)).sum())))
    return found


def _float64(tensor: Tensor) -> NDArray[np.float64]:
    values: NDArray[np.float64] = tensor.detach().to(torch.float32).numpy().astype(np.float64)
    return values
