"""Frozen weights padded to hold their adapter, so that one product computes W x and B A x.

A product with B reads r numbers of a token and writes all outputs: 117 us on a v6e chip for Mistral 7B's gate_proj and
2,048 tokens, where the frozen product takes 285, and both in one 302 (tests/benchmarks/RESULTS.md).
To multiply (W, B) by (x, A x), they must lie beside each other, and a copy of W for each product costs what is gained.
So W is stored with PADDING more columns, and a step writes B there, into the buffer that W is in. In the same way the
gradient of down_proj's input is one product, with A below W; and so is that of attention's input through k_proj and
the A of all that read it, which are below the narrowest of them.

In a loop over layers it is the stack of the layers' weights that is written into. A weight that is sharded, and that
such a loop gathers (ZeRO-3), is written where it is gathered: its shards have zeros there.

Only a training step reads the padding, after it has written there. All else reads W, as a slice; in a loop, where that
would be a copy, it multiplies the padding by zeros. Legend: K input features, N output features, r rank.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tpu_experiments.models.adapters.layouts import TOGETHER_RATIO, OneGradient, OneProduct, WideLora
from tpu_experiments.models.adapters.linear import LoraLinear, multiplied, put_in_place
from tpu_experiments.models.parts.contracted import summed_over
from tpu_experiments.models.parts.named import LOW, named
from tpu_experiments.runtime.kernels.contraction import contraction
from tpu_experiments.runtime.ops import apart, widened, written
from tpu_experiments.runtime.stacked import ADAPTER_PARTS, is_stack

A, B, *_ = ADAPTER_PARTS

PADDING = 128
"""Columns or rows added to a weight: the lanes of a TPU."""
MIN_FEATURES = 2048
"""Input features, and with A below W alone output features, from which a weight is padded.

Gemma 3 270M (640) gains nothing: it copies its small weights, 75,741 tokens/s and 75,830 padded."""
Padding = Literal["", "columns", "rows", "both"]
"""What a weight has more of than W, to hold B beside it or A below it."""
_weights: ContextVar[Mapping[str, Tensor] | None] = ContextVar("weights", default=None)


@contextmanager
def with_adapters(weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Let adapters inside the block compute with these weights, by the adapter's path, which hold A or B."""
    token = _weights.set(weights)
    try:
        yield
    finally:
        _weights.reset(token)


def weights_with_adapters() -> Mapping[str, Tensor]:
    """Return what `with_adapters` was given; nothing outside."""
    return _weights.get() or {}


class PaddedLora(WideLora):
    """An adapter whose weight is stored with padding, at a path in the model."""

    is_formula = False

    def __init__(
        self, plain: LoraLinear, *, padding: Padding, path: str, is_gathered: bool = False, parts: int | None = None
    ) -> None:
        """Take the place of `plain`.

        Args:
            is_gathered: whether the weight is sharded, and its padding filled wherever a loop over layers gathers it.
            parts: those that rows are split into where tokens are written in place (`with_low`), or None.
        """
        put_in_place(self, plain)
        self.padding, self.path, self.is_gathered, self.parts = padding, path, is_gathered, parts

    @property
    def is_written(self) -> bool:
        """Whether steps write the adapter into the weight that the device holds."""
        return not self.is_gathered

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return W (N, K), without padding."""
        return self.weight[..., : self.out_features, : self.in_features]

    def values(self, value_of: Callable[[LoraLinear, str], Tensor]) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        """Yield the parts of adapters that the padding holds, and the row and column that each begins at.

        Args:
            value_of: returns the A or B of an adapter of the family.
        """
        dtype = self.weight.dtype
        if self.padding != "columns":
            held = torch.cat([value_of(member, A) * member.scale for member in self.siblings.members], dim=-2)
            yield held.to(dtype), (self.out_features, 0)
        if self.padding != "rows":
            yield value_of(self, B).to(dtype), (0, self.in_features + self.siblings.first_of(self))


class PaddedRows(PaddedLora, OneGradient):
    """An adapter whose A lies below its weight (`below`)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features), in the data type of `x`."""
        if (weight := weights_with_adapters().get(self.path)) is None:
            return super().forward(x)
        a, in_loop = self.lora_A * self.scale, is_stack(self.path)
        out, low = below(x, weight, a, outputs=self.out_features, parts=self.parts, in_loop=in_loop)
        out = out + multiplied(named(low, LOW), self.lora_B)
        return out if self.bias is None else out + self.bias


class PaddedColumns(PaddedLora, OneProduct):
    """An adapter whose B lies beside its weight (`beside`), the A of all siblings below that of the narrowest."""

    group: "PaddedSiblings"

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features), in the data type of `x`."""
        if self.path not in weights_with_adapters():
            return super().forward(x)
        out = self.group.product(self, x)
        return out if self.bias is None else out + self.bias

    def frozen(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return what the layer computes without its adapter."""
        if is_stack(self.path):
            # W alone would be copied out of the stack. What the padding still holds is multiplied by 0.
            return F.linear(F.pad(x, (0, PADDING)), self.weight, bias)
        return super().frozen(x, bias)


class PaddedSiblings:
    """Adapters of padded weights that read one tensor, and compute all their products with it at the first's call."""

    def __init__(self, members: Sequence[PaddedColumns]) -> None:
        self.members = members
        self._x: Tensor | None = None
        self._outs: dict[int, Tensor] = {}
        """Products of members that have not read this tensor yet."""

    def product(self, member: PaddedColumns, x: Tensor) -> Tensor:
        """Return the product of `x` with the weight and the adapter of `member`, whose padding holds B."""
        if x is not self._x or id(member) not in self._outs:
            self._x, self._outs = x, dict(zip(map(id, self.members), self._products(x), strict=True))
        out = self._outs.pop(id(member))
        if not self._outs:
            self._x = None
        return out

    def _products(self, x: Tensor) -> tuple[Tensor, ...]:
        first = self.members[0]
        parts, in_loop = first.parts, is_stack(first.path)
        a = torch.cat([member.lora_A for member in self.members], dim=-2)
        source = x.detach() if any(member.padding == "both" for member in self.members) else x
        if first.dropout and first.training:
            low = first.low_rank(source, a)
            joined = joined_with(source, low, parts=parts)
        else:
            joined, low = with_low(source, a * first.scale, parts=parts)
        weights = [weights_with_adapters()[member.path] for member in self.members]
        return beside(joined, x, low, weights, [member.lora_B for member in self.members], parts=parts, in_loop=in_loop)


def padded_adapters(module: nn.Module) -> dict[str, PaddedLora]:
    """Return the adapters whose weights are padded to hold them, by their names in the module."""
    return {name: part for name, part in module.named_modules() if isinstance(part, PaddedLora)}


def fitting_padding(part: LoraLinear, *, in_loop: bool) -> Padding:
    """Choose how a weight is padded to hold the adapter; not at all where that does not pay.

    A step of Mistral 7B on v6e-8, r=32, takes 0.512 instead of 0.545 s with the MLP's weights padded (planned).

    Args:
        in_loop: whether the weight is one of a stack that a loop over layers reads.
    """
    family = part.siblings.members
    if any(not member.is_formula for member in family) or sum(m.lora_A.shape[-2] for m in family) > PADDING:
        return ""
    inputs, outputs = part.in_features, part.out_features
    if len(family) > 1 or outputs >= TOGETHER_RATIO * inputs:
        if inputs < MIN_FEATURES or inputs % PADDING:
            return ""
        narrowest = min(family, key=lambda member: member.out_features)
        # Dropout, which only A's inputs have, keeps gradients apart.
        holds_a = part is narrowest and inputs >= TOGETHER_RATIO * outputs and not in_loop and not part.dropout
        return "both" if holds_a else "columns"
    fits = inputs >= TOGETHER_RATIO * outputs and outputs >= MIN_FEATURES and outputs % PADDING == 0
    return "rows" if fits and not part.dropout else ""


def padded_family(
    family: Sequence[tuple[LoraLinear, str, Padding]], *, is_gathered: bool = False, parts: int | None = None
) -> Sequence[PaddedLora]:
    """Return adapters of padded weights in the place of those of one family, at these paths of a model."""
    more: Any = {"is_gathered": is_gathered, "parts": parts}
    if any(padding == "rows" for _, _, padding in family):
        return [PaddedRows(plain, padding=padding, path=path, **more) for plain, path, padding in family]
    made = [PaddedColumns(plain, padding=padding, path=path, **more) for plain, path, padding in family]
    group = PaddedSiblings(made)
    for part in made:
        part.group = group
    return made


def with_padding(weight: Tensor, values: Iterable[tuple[Tensor, tuple[int, int]]]) -> Tensor:
    """Write parts of adapters into a weight, or a stack of weights, each from a row and a column on."""
    for part, at in values:
        weight = written(weight, part, [*[0] * (weight.ndim - 2), *at])
    return weight


def with_low(x: Tensor, a: Tensor, *, parts: int | None) -> tuple[Tensor, Tensor]:
    """Return x with A x in its padding, (..., K + PADDING), and A x (..., r), named LOW.

    x is written into the wider tensor as it is computed, and A x behind it in place. Put together by `torch.cat` they
    are a pass of 45 us over 2,048 tokens of 4,096 features, or part of each product, which then gets smaller tiles
    (Mistral 7B on v6e-8: 426 instead of 363 us for the gradient of down_proj's input).

    Args:
        x: (..., K).
        a: scaled, (r, K).
        parts: see `widened` (runtime/ops.py); None puts both together by `torch.cat` all the same, which is faster
            where a loop gathers weights (Mistral 7B on v5e-8, FSDP: 4,504 instead of 4,395 tokens/s; where a loop's
            weights are whole, on v6e-8, 15,580 instead of 16,709).
    """
    out: tuple[Tensor, Tensor] = _WithLow.apply(x, a, parts)
    return out


def joined_with(x: Tensor, low: Tensor, *, parts: int | None) -> Tensor:
    """Return x (..., K) with values in its padding, (..., K + PADDING), as `with_low` does."""
    out: Tensor = _Joined.apply(x, low, parts)
    return out


def beside(
    joined: Tensor,
    x: Tensor,
    low: Tensor,
    weights: Sequence[Tensor],
    bs: Sequence[Tensor],
    *,
    parts: int | None = None,
    in_loop: bool = False,
) -> tuple[Tensor, ...]:
    """Multiply (x, A x) by weights that hold B beside W, to (..., N) each.

    Args:
        joined: x, and in its padding the values of all adapters, one behind the other, (..., K + PADDING).
        x: (..., K).
        low: the values of all adapters, (..., R).
        weights: (N, K + PADDING), frozen; where one has rows of padding too, the A of all adapters are in them, and the
            gradient of x includes that through A.
        bs: B in float32, (N, r), for its gradient.
        parts: see `with_low`.
        in_loop: whether the weights are cut out of stacks, from which XLA cuts W with a copy of its own. The gradients
            of x and A x are then one product with all of it, that of `joined` (Mistral 7B on v6e-8, folded: 0.585
            instead of 0.672 s a step); unrolled that loses (0.534 instead of 0.512 s).
    """
    joined, x, low = (joined, x.detach(), low.detach()) if in_loop else (joined.detach(), x, low)
    out: tuple[Tensor, ...] = _Beside.apply(joined, x, low, parts, *weights, *bs)
    return out


def below(
    x: Tensor, weight: Tensor, a: Tensor, *, outputs: int, parts: int | None = None, in_loop: bool = False
) -> tuple[Tensor, Tensor]:
    """Multiply (..., K) by a frozen weight (N + PADDING, K) that holds A below W, to (..., N), and by A, to (..., r).

    The gradient of x is one product.
    """
    out: tuple[Tensor, Tensor] = _Below.apply(x, weight, a, outputs, parts, not in_loop)
    return out


class _WithLow(Function):
    """A's gradient reads x where it is joined: another reader of the wider tensor would cost a copy of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, parts: int | None) -> tuple[Tensor, Tensor]:
        wide = x if parts is None else widened(x, PADDING, parts)
        low = named(contraction(wide[..., : x.shape[-1]], a.to(x.dtype), [x.ndim - 1], [1]), LOW)
        joined = _together(x, low, None) if parts is None else _behind(wide, low)
        ctx.save_for_backward(x if parts is None else joined, a)
        ctx.set_materialize_grads(False)
        return joined, low

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_joined: Tensor | None, of_low: Tensor | None) -> tuple[Tensor | None, ...]:
        source, a = ctx.saved_tensors
        inputs = a.shape[1]
        if of_joined is not None:
            through = of_joined[..., inputs : inputs + len(a)]
            of_low = through if of_low is None else of_low + through
        assert of_low is not None, "autograd calls for one of the two"
        tokens = list(range(source.ndim - 1))
        of_a = summed_over(tokens, of_low, source[..., :inputs], dtype=a.dtype)
        if not ctx.needs_input_grad[0]:
            return None, of_a, None
        of_x = contraction(of_low, a.to(of_low.dtype), [source.ndim - 1], [0])
        return of_x if of_joined is None else of_joined[..., :inputs] + of_x, of_a, None


class _Joined(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Tensor, parts: int | None) -> Tensor:
        ctx.inputs, ctx.rank = x.shape[-1], low.shape[-1]
        return _together(x, low, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad[..., : ctx.inputs], grad[..., ctx.inputs : ctx.inputs + ctx.rank], None


class _Beside(Function):
    @staticmethod
    def forward(
        ctx: Any, joined: Tensor, x: Tensor, low: Tensor, parts: int | None, *both: Tensor
    ) -> tuple[Tensor, ...]:
        weights, bs = both[: len(both) // 2], both[len(both) // 2 :]
        ctx.save_for_backward(low, *both)
        ctx.inputs, ctx.parts = x.shape[-1], parts
        features = [joined.ndim - 1]
        return tuple(contraction(joined, w[: len(b)], features, [1]) for w, b in zip(weights, bs, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        low, *both = ctx.saved_tensors
        weights, bs = both[: len(both) // 2], both[len(both) // 2 :]
        features, tokens = [low.ndim - 1], list(range(low.ndim - 1))
        lows = low.split([b.shape[1] for b in bs], dim=-1)
        if ctx.needs_input_grad[0]:
            # Written once, as the product with down_proj ends. In a loop each of four readers would compute them again
            # from the stacks of gate_proj's and up_proj's outputs (Mistral 7B with 4,096 tokens on a chip: 13,721
            # instead of 14,627 tokens/s on v6e-8, 4,748 instead of 4,867 on v5e-8).
            grads = tuple(apart(grad) for grad in grads)
        of_bs = [summed_over(tokens, g, part, dtype=b.dtype) for g, part, b in zip(grads, lows, bs, strict=True)]
        none = [None] * (1 + len(weights))
        if ctx.needs_input_grad[0]:
            of_joined = [contraction(g, weight, features, [0]) for g, weight in zip(grads, weights, strict=True)]
            return sum(of_joined[1:], of_joined[0]), None, None, *none, *of_bs
        of_lows = [contraction(g, b.to(g.dtype), features, [0]) for g, b in zip(grads, bs, strict=True)]
        of_low = torch.cat(of_lows, dim=-1)
        of_x: list[Tensor] = []
        for grad, weight, b in zip(grads, weights, bs, strict=True):
            whole = grad if len(weight) == len(b) else _together(grad, of_low, ctx.parts)
            of_x.append(contraction(whole, weight[:, : ctx.inputs], features, [0]))
        return None, sum(of_x[1:], of_x[0]), of_low, *none, *of_bs


class _Below(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, a: Tensor, outputs: int, parts: int | None, is_apart: bool
    ) -> tuple[Tensor, Tensor]:
        # The activation is written once, as the product with up_proj ends; else each of its three readers, dA among
        # them, computes it again. A barrier before its gradient too would keep that out of the product with W and A.
        # In a loop that product writes into a stack, and the activation would be a pass of its own, 215 us a layer.
        x = apart(x) if is_apart else x
        ctx.save_for_backward(x, weight, a)
        ctx.parts, ctx.is_apart = parts, is_apart
        features = [x.ndim - 1]
        if is_apart:
            return contraction(x, weight[:outputs], features, [1]), contraction(x, a.to(x.dtype), features, [1])
        # In a loop the product with A alone would compute the activation once more: 362 us of Mistral 7B's 4,096 tokens
        # on v5e, where 128 more columns of this one take 80.
        both = contraction(x, weight, features, [1])
        return both[..., :outputs], both[..., outputs : outputs + len(a)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, of_low: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a = ctx.saved_tensors
        joined = _together(grad, of_low, ctx.parts)
        # With a sum behind it XLA computes the gradients of gate_proj's and up_proj's outputs as the product ends, else
        # in a pass of their own: 251 us a layer, 22 ms of a step of Mistral 7B on v6e-8. What is added is 0, of a row
        # of the weight: a number of each token takes memory from the product's tiles (453 instead of 353 us). In a
        # loop, where the weight is cut out of a stack, it is that number (0.563 instead of 0.607 s a step), of the same
        # token: one of another chip's would cost an all-reduce a layer.
        zero = weight[-1] * 0 if ctx.is_apart else of_low[..., :1] * 0
        of_x = contraction(joined, weight, [grad.ndim - 1], [0]) + zero
        return of_x, None, summed_over(list(range(grad.ndim - 1)), of_low, x, dtype=a.dtype), None, None, None


def _together(x: Tensor, low: Tensor, parts: int | None) -> Tensor:
    """Return x (..., K) with values in its padding, (..., K + PADDING), and zeros behind them."""
    if parts is None:
        return torch.cat([x, F.pad(low, (0, PADDING - low.shape[-1]))], dim=-1)
    return _behind(widened(x, PADDING, parts), low)


def _behind(wide: Tensor, low: Tensor) -> Tensor:
    """Return (..., K + PADDING) with values in its padding, and zeros behind them."""
    values = F.pad(low, (0, PADDING - low.shape[-1]))
    return written(wide, values, [*[0] * (wide.ndim - 1), wide.shape[-1] - PADDING])
