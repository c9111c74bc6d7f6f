"""Constraints, sums over chips, barriers and transfers to host memory in TorchTPU's graphs.

TorchTPU lowers a collective only in a process group of TPUs (torch_tpu 0.2.0: "No backend type associated with device
type tpu"), so they go in as the StableHLO that XLA has for them. In `spmd` XLA partitions the program by the shardings
of its arguments and these constraints, as it does torch_xla's; in `spawn` every chip has a process and runs the program
on its rows, and sums are over all of them.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from tpu_experiments.config.mesh import Axes, Mesh
from tpu_experiments.runtime.kernels.on_torchtpu import spliced
from tpu_experiments.runtime.ops import APART, Constrain, Folding, HostMemory
from tpu_experiments.runtime.sharding import ShardingTable
from tpu_experiments.runtime.tpu.loop import traced_loop

SUM, CONSTRAIN = "tpu_experiments.sum_over_chips.default", "tpu_experiments.constrained.default"
HELD = "tpu_experiments.held_in.default"
OPERATORS = (SUM, CONSTRAIN, HELD, str(APART))
"""The operators of this file, and the barrier, as a traced graph names them."""
TYPES = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "int32": "i32",
    "int64": "i64",
    "int8": "i8",
    "uint8": "ui8",
    "bool": "i1",
}


@torch.library.custom_op("tpu_experiments::sum_over_chips", mutates_args=())
def _sum(tensor: Tensor) -> Tensor:
    raise AssertionError("tensors of the meta device have no values to sum")


@_sum.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


@torch.library.custom_op("tpu_experiments::constrained", mutates_args=())
def _constrained(tensor: Tensor, sharding: str) -> Tensor:
    raise AssertionError("tensors of the meta device have no values to shard")


@_constrained.register_fake
def _(tensor: Tensor, sharding: str) -> Tensor:
    return torch.empty_like(tensor)


_constrained.register_autograd(lambda ctx, grad: (grad, None))


@torch.library.custom_op("tpu_experiments::held_in", mutates_args=())
def _held_in(tensor: Tensor, memory: str) -> Tensor:
    raise AssertionError("tensors of the meta device have no values to move")


@_held_in.register_fake
def _(tensor: Tensor, memory: str) -> Tensor:
    return torch.empty_like(tensor)


def host_memory() -> HostMemory:
    """Return a TPU's transfers to and from its host's memory, which XLA's host offloader reads as annotations."""
    return HostMemory(put=lambda x: _held_in(x, "pinned_host"), fetch=lambda x: _held_in(x, "device"))


def sum_over_chips(tensors: list[Tensor]) -> list[Tensor]:
    """Sum each tensor over all chips."""
    return [_sum(tensor.detach()) for tensor in tensors]


def constraints_over(mesh: Mesh) -> Constrain:
    """Return the `Constrain` of a program that XLA partitions over the mesh."""

    def constrain(tensor: Tensor, *, axes: Axes) -> Tensor:
        whole = (*axes, *(None for _ in range(tensor.ndim - len(axes))))
        made: Tensor = _constrained(tensor, mesh.sharding_text(whole))
        return made

    return constrain


def folding_over(mesh: Mesh, table: ShardingTable | None, *, device: str) -> Folding:
    """Return what folded layers need on chips over which XLA partitions programs; without a table it does not."""
    host = host_memory() if device == "tpu" else HostMemory()
    if table is None:
        return Folding(traced_loop, host=host)
    return Folding(traced_loop, constraints_over(mesh), table.axes, host, row_shards=mesh.num_shards)


def lowered_operator(name: str, arguments: tuple[Any, ...], *, num: int) -> Tensor:
    """Return the result of one of `OPERATORS` on TorchTPU's placeholders.

    Args:
        num: processes that a sum is over.
    """
    tensor, *how = arguments
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    kind = TYPES[dtype]
    if name == SUM:
        text = _text_of_sum(shape, kind, num=num)
    elif name == CONSTRAIN:
        text = _text_of_constraint(shape, kind, sharding=how[0])
    elif name == HELD:
        text = _text_of_transfer(shape, kind, memory=how[0])
    else:
        text = _text_of_barrier(shape, kind)
    (made,) = spliced(text, inputs=[tensor], results=((shape, dtype),))
    return made


@functools.cache
def _text_of_sum(shape: tuple[int, ...], dtype: str, *, num: int) -> str:
    of, scalar = _type(shape, dtype), f"tensor<{dtype}>"
    groups = f"dense<{[list(range(num))]}> : tensor<1x{num}xi64>"
    return _function(
        of,
        f"""    %same = "stablehlo.all_reduce"(%x) <{{replica_groups = {groups}}}> ({{
    ^bb0(%a: {scalar}, %b: {scalar}):
      %both = stablehlo.add %a, %b : {scalar}
      stablehlo.return %both : {scalar}
    }}) : ({of}) -> {of}""",
    )


@functools.cache
def _text_of_constraint(shape: tuple[int, ...], dtype: str, *, sharding: str) -> str:
    of = _type(shape, dtype)
    call = f'stablehlo.custom_call @Sharding(%x) {{mhlo.sharding = "{sharding}"}} : ({of}) -> {of}'
    return _function(of, f"    %same = {call}")


@functools.cache
def _text_of_transfer(shape: tuple[int, ...], dtype: str, *, memory: str) -> str:
    of = _type(shape, dtype)
    where = f'has_side_effect = true, mhlo.frontend_attributes = {{_xla_buffer_placement = "{memory}"}}'
    call = f"stablehlo.custom_call @annotate_device_placement(%x) {{{where}}} : ({of}) -> {of}"
    return _function(of, f"    %same = {call}")


@functools.cache
def _text_of_barrier(shape: tuple[int, ...], dtype: str) -> str:
    of = _type(shape, dtype)
    return _function(of, f"    %same = stablehlo.optimization_barrier %x : {of}")


def _function(of: str, body: str) -> str:
    """Return the module of (result, once, argument) -> result, as `spliced` takes it; `body` computes %same of %x."""
    return f"""module {{
  func.func @main(%before: {of}, %once: tensor<f32>, %x: {of}) -> {of} {{
{body}
    return %same : {of}
  }}
}}
"""


def _type(shape: tuple[int, ...], dtype: str) -> str:
    return f"tensor<{''.join(f'{size}x' for size in shape)}{dtype}>"
