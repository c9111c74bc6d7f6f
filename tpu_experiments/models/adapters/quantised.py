"""Frozen linear layers over int8 or NF4 codes, in plain torch for XLA, CPU and CUDA.

int8 has one scale per output feature (W8A16, as bitsandbytes' `int8_vectorwise_quant`). NF4 has a table of 16 values
and a scale per block of 64 weights, itself in 8 bits where `double_quant` (QLoRA, arXiv 2305.14314). Codes and scales
are bitsandbytes' bit for bit. A product saves codes for its backward pass, never a decoded weight.
Legend: N output features, K input features, G blocks of 64 weights."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import ALL_LINEAR, ModelConfig, is_target
from tpu_experiments.runtime.dynamic_type import SIGNED, XLA_DEVICES
from tpu_experiments.runtime.kernels import on_cuda
from tpu_experiments.runtime.kernels.integers import int8_product
from tpu_experiments.runtime.stacked import SIDE_TENSORS

BLOCK = 64
"""Weights that share one scale in NF4; bitsandbytes' default."""
CHUNK = 2**22
"""Weights that are quantised at once: bounds the memory for it to 50 MB."""
NESTED_BLOCK = 256
"""Scales that share one scale of their own."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of the normal distribution, in [-1, 1] (arXiv 2305.14314, appendix E)."""
SCALE, ABSMAX, NESTED, OFFSET = SIDE_TENSORS
Parts = Mapping[str, Tensor]
"""Codes and their scales by the last part of their name."""


@dataclass(frozen=True)
class Format:
    """How the weights of a frozen Linear are stored."""

    base: str
    """`int8` or `nf4`, as in `model.base`."""
    double_quant: bool = True
    """Whether the scales of NF4 are stored in 8 bits."""
    int8_activations: bool = False
    """Whether products multiply int8 by int8, with one scale per token taken from the activations as they come."""

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and data type of the tensors that stand for a weight (N, K).

        Raises:
            ValueError: NF4 and the weight does not divide into blocks.
        """
        rows, columns = shape
        if self.base == "int8":
            return {"weight": (shape, torch.int8), SCALE: ((rows,), torch.float32)}
        if rows * columns % BLOCK or columns % 2:
            raise ValueError(f"{rows} x {columns} weights do not divide into blocks of {BLOCK}, or are of odd width")
        blocks = rows * columns // BLOCK
        blocked = (rows, columns // BLOCK) if columns % BLOCK == 0 else (blocks,)
        codes = {"weight": ((rows, columns // 2), torch.uint8)}
        if not self.double_quant:
            return codes | {ABSMAX: (blocked, torch.float32)}
        return codes | {
            ABSMAX: (blocked, torch.uint8),
            NESTED: ((math.ceil(blocks / NESTED_BLOCK),), torch.float32),
            OFFSET: ((1,), torch.float32),
        }

    def quantise(self, weight_NK: Tensor) -> dict[str, Tensor]:
        """Return codes and scales of a weight on the host; of one on the meta device, empty ones."""
        if weight_NK.is_meta:
            wanted = self.shapes(tuple(weight_NK.shape))
            return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in wanted.items()}
        if self.base == "int8":
            return _int8(weight_NK)
        return _nf4(weight_NK, shapes=self.shapes(tuple(weight_NK.shape)))

    def decode(self, parts: Parts, *, dtype: torch.dtype) -> Tensor:
        """Return the weight (N, K) that codes and scales stand for."""
        codes = parts["weight"]
        if self.base == "int8":
            return (codes.to(torch.float32) * parts[SCALE][:, None]).to(dtype)
        if _has_kernels(parts):
            return on_cuda.nf4_weight(codes, _scales(parts), block=BLOCK, dtype=dtype)
        values = _nf4_values(_unpacked(codes)).view(-1, BLOCK) * _scales_of_blocks(parts)[:, None]
        return values.view(len(codes), -1).to(dtype)


def _int8(weight_NK: Tensor) -> dict[str, Tensor]:
    """Quantise each row to -127..127 by its largest magnitude."""
    codes_NK = torch.empty(weight_NK.shape, dtype=torch.int8)
    absmax_N = torch.empty(len(weight_NK))
    rows = max(1, CHUNK // weight_NK.shape[1])
    for some, codes, absmax in zip(weight_NK.split(rows), codes_NK.split(rows), absmax_N.split(rows), strict=True):
        absmax.copy_(some.abs().amax(1))
        factor = torch.where(absmax > 0, 127.0 / absmax, 1.0)
        codes.copy_(torch.round(some * factor[:, None]))
    return {"weight": codes_NK, SCALE: absmax_N / 127.0}


def _nf4(weight_NK: Tensor, *, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
    """Quantise blocks of 64 weights, in row-major order, to the nearest of 16 values; two codes to a byte."""
    blocks_GB = weight_NK.reshape(-1, BLOCK)
    absmax_G = torch.empty(len(blocks_GB))
    packed_GB = torch.empty(len(blocks_GB), BLOCK // 2, dtype=torch.uint8)
    count, borders = CHUNK // BLOCK, _between(torch.tensor(NF4))
    for some, absmax, packed in zip(blocks_GB.split(count), absmax_G.split(count), packed_GB.split(count), strict=True):
        values = some.to(torch.float32)
        absmax.copy_(values.abs().amax(1))
        scaled = (values * (1.0 / absmax.clamp(min=1e-38))[:, None]).clamp(-1, 1)
        codes = torch.bucketize(scaled, borders, out_int32=True).to(torch.uint8)
        packed.copy_((codes[:, ::2] << 4) | codes[:, 1::2])
    packed = packed_GB.view(shapes["weight"][0])
    shape, dtype = shapes[ABSMAX]
    if dtype == torch.float32:
        return {"weight": packed, ABSMAX: absmax_G.view(shape)}
    offset = absmax_G.mean()
    padding = -len(absmax_G) % NESTED_BLOCK
    centred_HB = F.pad(absmax_G - offset, (0, padding)).view(-1, NESTED_BLOCK)
    nested_H = centred_HB.abs().amax(1)
    scaled_HB = centred_HB * (1.0 / nested_H.clamp(min=1e-38))[:, None]
    scales_G = torch.bucketize(scaled_HB, _between(torch.tensor(SIGNED))).to(torch.uint8).flatten()[: len(absmax_G)]
    return {"weight": packed, ABSMAX: scales_G.view(shape), NESTED: nested_H, OFFSET: offset.view(1)}


def _between(values: Tensor) -> Tensor:
    """Return the midpoints of sorted values: which of them is nearest changes there."""
    return (values[:-1] + values[1:]) / 2


def _unpacked(packed: Tensor) -> Tensor:
    """Return the codes of a tensor of bytes in their order: (2 x its elements,)."""
    return torch.stack((packed >> 4, packed & 15), -1).flatten()


def _nf4_values(codes: Tensor) -> Tensor:
    """Return NF4's values at the codes, float32.

    In XLA's programs by choosing between pairs, bit by bit, since a table would be sent with every step.
    """
    if codes.device.type not in XLA_DEVICES:
        return torch.tensor(NF4, device=codes.device)[codes.int()]
    values: list[Tensor | float] = list(NF4)
    for bit in range(4):
        is_set = (codes >> bit & 1).bool()
        values = [torch.where(is_set, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    (found,) = values
    assert isinstance(found, Tensor)
    return found.to(torch.float32)


def _eight_bit(codes: Tensor) -> Tensor:
    """Return the values of the dynamic data type at the codes, float32; to one unit in the last place by XLA.

    Magnitude m of m - 127 has a decade 10^(e - 6) with e = floor(log2 m), of which it is one of 2^e equal parts.
    """
    if codes.device.type not in XLA_DEVICES:
        return torch.tensor(SIGNED, device=codes.device)[codes.int()]
    signed = codes.to(torch.int32) - 127
    magnitude = signed.abs()
    parts, decade = torch.ones_like(magnitude), torch.full_like(magnitude, 1e-6, dtype=torch.float32)
    for exponent in range(1, 7):
        is_above = magnitude >= 2**exponent
        parts = torch.where(is_above, 2**exponent, parts)
        decade = torch.where(is_above, 10.0 ** (exponent - 6), decade)
    values = torch.sign(signed) * decade * (0.1 + (magnitude - parts + 0.5) * (0.9 / parts))
    return torch.where(signed == 128, 1.0, values)


def _has_kernels(parts: Parts) -> bool:
    """Return whether bitsandbytes' kernels take these codes: on a GPU, in rows of whole blocks."""
    codes = parts["weight"]
    return codes.is_cuda and 2 * codes.shape[1] % BLOCK == 0 and on_cuda.has_bitsandbytes()


def _scales(parts: Parts) -> list[Tensor]:
    return [parts[name] for name in (ABSMAX, NESTED, OFFSET) if name in parts]


def _scales_of_blocks(parts: Parts) -> Tensor:
    """Return the scale of every block, float32 (G,)."""
    absmax_G = parts[ABSMAX].flatten()
    if NESTED not in parts:
        return absmax_G
    values = _eight_bit(absmax_G)
    nested_G = parts[NESTED].repeat_interleave(NESTED_BLOCK)[: len(absmax_G)]
    return values * nested_G + parts[OFFSET]


def frozen_product(x: Tensor, parts: Parts, *, format: Format, bias: Tensor | None = None) -> Tensor:
    """Multiply (..., K) by a quantised weight (N, K), in the data type of `x`; its weight has no gradient."""
    out: Tensor = _Product.apply(x, format, tuple(parts), *parts.values())
    return out if bias is None else out + bias.to(out.dtype)


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, format: Format, names: tuple[str, ...], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.format, ctx.names = format, names
        parts = dict(zip(names, tensors, strict=True))
        if format.base == "nf4":
            if _has_kernels(parts):
                return on_cuda.nf4_product(x, parts["weight"], _scales(parts), block=BLOCK)
            return F.linear(x, format.decode(parts, dtype=x.dtype))
        if format.int8_activations:
            return (_rounded_product(x, parts["weight"], contracted=1) * parts[SCALE]).to(x.dtype)
        # int8 is exact in bf16; the scale is applied to the sum, in float32.
        return (F.linear(x, parts["weight"].to(x.dtype)).to(torch.float32) * parts[SCALE]).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        format, parts = ctx.format, dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        if format.base == "nf4":
            of_x = grad @ format.decode(parts, dtype=grad.dtype)
        else:
            scaled = grad.to(torch.float32) * parts[SCALE]
            if format.int8_activations:
                of_x = _rounded_product(scaled, parts["weight"], contracted=0).to(grad.dtype)
            else:
                of_x = scaled.to(grad.dtype) @ parts["weight"].to(grad.dtype)
        return (of_x, None, None, *(None for _ in ctx.names))


def _rounded_product(x: Tensor, codes_NK: Tensor, *, contracted: int) -> Tensor:
    """Multiply tokens that are rounded to int8, each by its own largest magnitude, with int8 weights: float32."""
    absmax = x.abs().amax(-1, keepdim=True).to(torch.float32).clamp(min=1e-30)
    rounded = torch.round(x.to(torch.float32) * (127.0 / absmax)).to(torch.int8)
    sums = int8_product(rounded.flatten(0, -2), codes_NK, contracted)
    return sums.view(*x.shape[:-1], -1).to(torch.float32) * (absmax / 127.0)


class QuantLinear(nn.Module):
    """A frozen Linear over codes; parameters `weight` (the codes), their scales, `bias`."""

    def __init__(self, linear: nn.Linear, format: Format) -> None:
        super().__init__()
        self.in_features, self.out_features, self.format = linear.in_features, linear.out_features, format
        for name, (shape, dtype) in format.shapes((self.out_features, self.in_features)).items():
            empty = torch.empty(shape, dtype=dtype, device=linear.weight.device)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features), in the data type of `x`."""
        return frozen_product(x, parts_of(self), format=self.format, bias=self.bias)


def parts_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the codes and scales that a module has."""
    own = module._parameters
    return {name: p for name in ("weight", *SIDE_TENSORS) if (p := own.get(name)) is not None}


def format_of(model: ModelConfig) -> Format | None:
    """Return how the model's frozen weights are stored; None for weights in `model.dtype`."""
    if model.base == "dense":
        return None
    return Format(model.base, model.base_double_quant, model.base_activations == "int8")


def quantise_linears(module: nn.Module, model: ModelConfig) -> None:
    """Put a `QuantLinear` in the place of every Linear of the layers of an empty module.

    Head and embedding stay as they are.

    Raises:
        ConfigError: the layers hold most of their weights in modules other than Linear, or in widths that the format
            cannot hold.
    """
    format = format_of(model)
    if format is None:
        return
    module.requires_grad_(False)
    linears = {n: m for n, m in module.named_modules() if type(m) is nn.Linear and is_target(n, ALL_LINEAR)}
    others = sum(isinstance(m, Conv1D) for m in module.modules())
    inside = sum(p.numel() for n, p in module.named_parameters() if any(part.isdigit() for part in n.split(".")))
    covered = sum(m.weight.numel() for m in linears.values())
    if others or 2 * covered < inside:
        raise ConfigError(
            f"model.base={model.base}; {covered:,} of the {inside:,} weights of the layers of {model.name} are in "
            "Linear modules, and no other kind is quantised (GPT-2's Conv1D, stacked experts); set model.base=dense."
        )
    for name, linear in linears.items():
        parent, _, leaf = name.rpartition(".")
        try:
            made = QuantLinear(linear, format)
        except ValueError as error:
            raise ConfigError(f"model.base={model.base}; {name}: {error}; set model.base=int8 or dense.") from error
        setattr(module.get_submodule(parent), leaf, made)


def quantised_shapes(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the dense shape (N, K) of every weight that is held as codes, by name."""
    return {
        f"{name}.weight": (part.out_features, part.in_features)
        for name, part in module.named_modules()
        if getattr(part, "format", None) is not None
    }


def as_parts(name: str, weight: Tensor, *, format: Format) -> Iterator[tuple[str, Tensor]]:
    """Yield codes and scales under the names of their parameters."""
    prefix = name.removesuffix("weight")
    for part, tensor in format.quantise(weight).items():
        yield prefix + part, tensor
