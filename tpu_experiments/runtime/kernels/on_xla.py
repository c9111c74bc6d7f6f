"""The TPU's kernels in torch_xla's graphs: attention, grouped products and the gated delta rule.

They are lowered by jax once, then embedded.
Lowering needs no TPU, so a plan on a CPU and a run on a TPU get the same kernel.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch import Tensor

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.mesh import Mesh
from tpu_experiments.runtime.kernels.attention import (
    MAX_BLOCK,
    AttentionCall,
    Direction,
    Scores,
    Target,
    call_of,
    holds_rows,
)
from tpu_experiments.runtime.kernels.contraction import contraction
from tpu_experiments.runtime.kernels.delta import DeltaCall, Four, schedule_flops
from tpu_experiments.runtime.kernels.grouped import (
    GroupedProducts,
    expert_order,
    grouped_outer,
    grouped_product,
    grouped_products,
    rows_at,
)
from tpu_experiments.runtime.kernels.integers import int8_product


class XlaAttention:
    """An `AttentionKernel` for tensors of torch_xla, placeholders included.

    Args:
        mesh: chips that rows and heads are sharded over.
        target: `interpreted` runs the kernel's steps as plain XLA, for tests on a CPU.
        max_block: tokens in the largest block.
        holds_rows: whether the chip's vector memory holds a row of several blocks.
    """

    def __init__(
        self, *, mesh: Mesh, target: Target = "tpu", max_block: int = MAX_BLOCK, holds_rows: bool = True
    ) -> None:
        self.mesh, self.target, self.max_block, self.holds_rows = mesh, target, max_block, holds_rows

    def forward(self, *tensors: Tensor, heads: int, scores: Scores) -> tuple[Tensor, Tensor]:
        """Return the output (B, T, H D) and the log-sum-exp of the scores (B, H, T)."""
        out, log_sum = self._embedded(*tensors, heads=heads, scores=scores, direction="forward")
        return out, log_sum

    def backward(self, *saved: Tensor, grad: Tensor, heads: int, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""
        dq, dk, dv = self._embedded(*saved, grad, heads=heads, scores=scores, direction="backward")
        return dq, dk, dv

    def _embedded(self, *tensors: Tensor, heads: int, scores: Scores, direction: Direction) -> list[Tensor]:
        call, given = call_of(
            tensors,
            heads=heads,
            scores=scores,
            max_block=self.max_block,
            holds_rows=self.holds_rows,
            num_shards=self.mesh.num_shards,
            head_shards=self.mesh.tensor,
        )
        computation = _computation(call, direction=direction, target=self.target)
        results: list[Tensor] = torch_xla._XLAC._xla_user_computation(f"xla::attention_{direction}", given, computation)
        return results


def attention_kernel_for(hw: HwConfig, *, mesh: Mesh, device: str) -> XlaAttention | None:
    """Return the kernel of programs for `device` (`tpu`, in either case); None for every other device."""
    if device.lower() != "tpu":
        return None
    return XlaAttention(
        mesh=mesh if hw.parallel == "spmd" else Mesh(),
        max_block=hw.attention_block,
        holds_rows=holds_rows(hw.chip),
    )


@functools.cache
def _computation(call: AttentionCall, *, direction: Direction, target: Target) -> object:
    try:  # imported here, since jax takes seconds to import and most programs have no kernel
        from tpu_experiments.runtime.kernels.splash import lowered
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"model.attention=flash; its kernel is made by jax, and {error.name} is not installed; "
            "install the extra `tpu`, or use model.attention=sdpa."
        ) from error
    module = lowered(call, direction=direction, target=target)
    return xb.computation_from_module_proto(f"attention_{direction}", module)


@int8_product.register_kernel("xla")
def _(x_TK: Tensor, weight: Tensor, contracted: int) -> Tensor:
    dimensions: tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]] = (([1], [contracted]), ([], []))
    product: Tensor = torch_xla._XLAC._xla_dot_general(x_TK, weight, dimensions, preferred_element_type=torch.int32)
    return product


@contraction.register_kernel("xla")
def _(a: Tensor, b: Tensor, of_a: Sequence[int], of_b: Sequence[int], in_parts: bool = False) -> Tensor:
    kept = [0] if in_parts else []
    made: Tensor = torch_xla._XLAC._xla_dot_general(a, b, ((list(of_a), list(of_b)), (kept, kept)))
    return made


def grouped_products_for(hw: HwConfig, *, mesh: Mesh, device: str) -> GroupedProducts | None:
    """Return how programs for `device` (`tpu`, in either case) multiply groups; None for every other device."""
    if device.lower() != "tpu":
        return None
    return GroupedProducts(mesh if hw.parallel == "spmd" else Mesh())


@expert_order.register_kernel("xla")
def _(chosen: Tensor, experts: int, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    order, place, sizes = _grouped("order", chosen, experts=experts)
    return order, place, sizes


@rows_at.register_kernel("xla")
def _(x: Tensor, index: Tensor, parts: int) -> Tensor:
    return _grouped("rows", x, index)[0]


@grouped_product.register_kernel("xla")
def _(x: Tensor, weight: Tensor, sizes: Tensor, contracted: int) -> Tensor:
    return _grouped("product", x, weight, sizes, contracted=contracted)[0]


@grouped_outer.register_kernel("xla")
def _(a: Tensor, b: Tensor, sizes: Tensor, dtype: torch.dtype) -> Tensor:
    kind = str(dtype).removeprefix("torch.")
    return _grouped("outer", a, b, sizes, experts=sizes.shape[1], dtype=kind)[0]


def _grouped(name: str, *tensors: Tensor, **settings: Any) -> list[Tensor]:
    products = grouped_products()
    assert products is not None, "experts ask for them before they use them"
    shapes = tuple((tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors)
    computation = _grouped_computation(name, products, tuple(settings.items()), shapes)
    made: list[Tensor] = torch_xla._XLAC._xla_user_computation(f"xla::grouped_{name}", tensors, computation)
    return made


@functools.cache
def _grouped_computation(
    name: str,
    products: GroupedProducts,
    settings: tuple[tuple[str, Any], ...],
    shapes: tuple[tuple[tuple[int, ...], str], ...],
) -> object:
    from tpu_experiments.runtime.kernels.megablox import lowered  # imported here as `splash` is

    return xb.computation_from_module_proto(f"grouped_{name}", lowered(name, products, settings, shapes))


class XlaDeltaRule:
    """A `DeltaKernel` for tensors of torch_xla, placeholders included.

    Args:
        mesh: chips that rows and heads are sharded over.
        flops: of `DeltaCall`.
        target: `interpreted` runs the kernel's steps as plain XLA, for tests on a CPU.
    """

    def __init__(self, *, mesh: Mesh, flops: tuple[float, float], target: Target = "tpu") -> None:
        self.mesh, self.flops, self.target = mesh, flops, target

    def forward(self, *given: Tensor) -> Four:
        """Return the output, and state, inverse and corrections of each chunk."""
        return self._embedded("forward", given)

    def backward(self, *saved: Tensor) -> Four:
        """Return the gradients of queries, keys, values and numbers."""
        return self._embedded("backward", saved)

    def _embedded(self, direction: Direction, given: tuple[Tensor, ...]) -> Four:
        query, numbers = given[0], given[3]
        dtype = str(query.dtype).removeprefix("torch.")
        call = DeltaCall(query.shape[0], numbers.shape[1], query.shape[1], dtype, self.mesh, self.flops, self.target)
        computation = _delta_computation(call, direction)
        one, two, three, four = torch_xla._XLAC._xla_user_computation(f"xla::delta_{direction}", given, computation)
        return one, two, three, four


def delta_rule_for(hw: HwConfig, *, mesh: Mesh, device: str) -> XlaDeltaRule | None:
    """Return the kernel of programs for `device` (`tpu`, in either case); None for every other device."""
    if device.lower() != "tpu":
        return None
    return XlaDeltaRule(mesh=mesh if hw.parallel == "spmd" else Mesh(), flops=schedule_flops(hw))


@functools.cache
def _delta_computation(call: DeltaCall, direction: Direction) -> object:
    from tpu_experiments.runtime.kernels.delta_rows import lowered  # imported here as `splash` is

    return xb.computation_from_module_proto(f"delta_{direction}", lowered(call, direction=direction))
