"""The formula of an adapter, y = W x + scale * B A x, and what adapters that read one tensor compute together.

What computes the same otherwise, for how a weight is stored or for speed, is a class of its own, chosen when a model is
built: layouts.py, dora.py, low_rank_qat.py, padded.py.
"""

import itertools
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tpu_experiments.models.adapters.packed import by_adapter
from tpu_experiments.models.adapters.quantised import Format, QuantLinear
from tpu_experiments.models.parts.contracted import contracted
from tpu_experiments.models.parts.dropout import dropped, layer_and_hash, noise_in_use
from tpu_experiments.models.parts.float32_gradients import product
from tpu_experiments.models.parts.named import LOW, named
from tpu_experiments.runtime.dynamic_type import XLA_DEVICES

Linear: TypeAlias = nn.Linear | Conv1D | QuantLinear


class LoraLinear(nn.Module):
    """A frozen Linear with an adapter: y = W x + b + scale * B A x; the Linear's parameters, `lora_A` and `lora_B`."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    format: Format | None = None
    is_transposed = False
    is_formula = True
    """Whether W is a matrix (N, K) in the model's data type, and nothing but the formula is computed: other layouts
    can take the module's place (`put_in_place`)."""
    names_its_products = False
    """Whether the module names what a remat policy saves of it, in the place of its output."""

    def __init__(self, linear: Linear, *, r: int, scale: float, dropout: float, name: str = "") -> None:
        """Wrap `linear`; `name` is its path in the model, on which dropout masks depend."""
        super().__init__()
        self.leaf, (self.layer_idx, self.site) = name.rpartition(".")[2], layer_and_hash(name)
        self.in_features, self.out_features = features_of(linear)
        self.scale, self.dropout, self.siblings = scale, dropout, Siblings([self])
        for name, own in (*linear.named_parameters(recurse=False), ("bias", linear.bias)):
            self.register_parameter(name, own)
        device: torch.device = self.weight.device
        self.lora_A = nn.Parameter(torch.empty(r, self.in_features, dtype=torch.float32, device=device))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, r, dtype=torch.float32, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features), in the data type of `x`."""
        low = self.siblings.low_rank(self, x)
        return self.frozen(x, self.bias) + multiplied(low, self.lora_B)

    def frozen(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return what the layer computes without its adapter."""
        return F.linear(x, self.matrix(x.dtype), bias)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return W (N, K), in this data type where it is decoded."""
        return self.weight

    def low_rank(self, x: Tensor, a: Tensor) -> Tensor:
        """Multiply `a` (k, in_features) with `x` after dropout, and scale: (..., k). Remat always saves it."""
        # A is scaled, not the product, which XLA fuses otherwise where a factor other than 1 follows (contracted.py).
        return named(multiplied(self.dropped(x), a * self.scale), LOW)

    def dropped(self, x: Tensor, *, feature_dims: int = 1) -> Tensor:
        """Apply dropout with a mask derived from the row's random word.

        Raises:
            RuntimeError: the batch of this forward pass has no random words.
        """
        if not self.dropout or not self.training:
            return x
        noise, site = noise_in_use(f"lora.dropout={self.dropout}", off="lora.dropout=0"), self.siblings.site
        layer, keep = noise.layer_of(self.layer_idx), 1 - self.dropout
        return dropped(x, noise.words_R, layer=layer, site=site, keep=keep, feature_dims=feature_dims)


def put_in_place(made: LoraLinear, of: LoraLinear) -> None:
    """Let a new module of another layout have the parameters, settings, hooks and siblings of the one that it replaces.

    Its class's `__init__` calls this in the place of `nn.Module`'s.
    """
    vars(made).update(vars(of))
    made.siblings.members[made.siblings.members.index(of)] = made


class Siblings:
    """Adapters that read one tensor and multiply it by their A together; most have none but themselves.

    One product with (A_q; A_k; A_v), one with its gradient and one dropout mask replace three of each, all of which
    read or write every feature of the tensor. A member that is given another tensor than its predecessor computes for
    itself.
    """

    def __init__(self, members: list[LoraLinear]) -> None:
        self.members, self.site = members, members[0].site
        self._x: Tensor | None = None
        self._all: Tensor | None = None
        self._joined: Tensor | None = None
        self._lows: dict[int, tuple[Tensor, int]] = {}
        """Values of members that have not read this tensor yet, and the number of their first among all."""

    @staticmethod
    def link(members: list[LoraLinear]) -> None:
        """Make modules siblings."""
        siblings = Siblings(members)
        for member in members:
            member.siblings = siblings

    def low_rank(self, member: LoraLinear, x: Tensor) -> Tensor:
        """Return the low-rank product of `member` for `x`: (..., in_features) to (..., r)."""
        if len(self.members) > 1:
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

    def first_of(self, member: LoraLinear) -> int:
        """Return the number of the first value of `member` among those of all members."""
        return sum(m.lora_A.shape[-2] for m in itertools.takewhile(lambda m: m is not member, self.members))

    def _multiply(self, member: LoraLinear, x: Tensor) -> None:
        if x is self._x:
            return
        self._x, self._joined = x, None
        self._all = member.low_rank(x, torch.cat([m.lora_A for m in self.members], dim=-2))
        ranks = [m.lora_A.shape[-2] for m in self.members]
        lows, firsts = self._all.split(ranks, dim=-1), itertools.accumulate([0, *ranks[:-1]])
        self._lows = {id(m): (low, first) for m, low, first in zip(self.members, lows, firsts, strict=True)}

    def _forget(self) -> None:
        if not self._lows:
            self._x = self._all = self._joined = None


def multiplied(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply (..., in) by an adapter's (out, in); by those of a pack (K, out, in), each adapter's rows by its own."""
    if weight.ndim == 3:
        return by_adapter(x, weight)
    return contracted(x, weight) if x.device.type in XLA_DEVICES else product(x, weight)


def features_of(linear: Linear) -> tuple[int, int]:
    """Return the input and the output width of a linear layer."""
    if isinstance(linear, Conv1D):
        return linear.nx, linear.nf
    return linear.in_features, linear.out_features
