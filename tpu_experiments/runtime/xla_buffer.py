"""Uninitialised buffers in a TPU program, for the output stacks of loops.

torch_xla fills these stacks with zeros. For the tensors that 32 layers of Mistral 7B save for the backward pass that
took 160 ms of a step of 880 ms (libtpu 0.0.21 for v6e, estimate).
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.experimental.scan as torch_xla_scan
from torch import Tensor

from tpu_experiments.config.mesh import Mesh
from tpu_experiments.runtime.patches import replaced

NAMES = {
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.uint8: "ui8",
    torch.int32: "i32",
}
"""StableHLO's names of types."""
Unwritten = Callable[[tuple[int, ...], torch.dtype], Tensor | None]
"""Maps the shape and type of a stack to an uninitialised tensor; None where it has to be filled with zeros."""


def unwritten_for(device: str, *, mesh: Mesh) -> Callable[[int], Unwritten] | None:
    """Return a function from the number of rows to the allocator of stacks; None: fill them with zeros.

    A stack of values with a leading row dimension is sharded as they are. None on devices other than a TPU, whose
    compilers lack the operation, and where `tensor` shards features: XLA decides which values that applies to, and
    a stack annotated as replicated along `tensor` would force an all-gather.
    """
    if device.lower() != "tpu" or mesh.tensor > 1:
        return None
    num_shards = mesh.num_shards

    def for_rows(rows: int) -> Unwritten:
        def make(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
            if len(shape) < 2 or shape[1] % rows or rows % num_shards or dtype not in NAMES:
                return None
            anchor = torch.zeros((), dtype=torch.int32, device=torch_xla.device())  # an operation needs an input
            made: list[Tensor] = torch_xla._XLAC._xla_user_computation(
                "xla::unwritten", [anchor], _computation(shape, dtype, num_shards)
            )
            return made[0]

        return make

    return for_rows


@functools.cache
def _computation(shape: tuple[int, ...], dtype: torch.dtype, num_shards: int) -> object:
    from jax._src.lib import xla_client

    text = stablehlo(shape, NAMES[dtype], num_shards=num_shards)
    computation = xla_client._xla.mlir.mlir_module_to_xla_computation(text, use_tuple_args=False, return_tuple=False)
    return xb.computation_from_module_proto("unwritten", computation.as_serialized_hlo_module_proto())


def stablehlo(shape: tuple[int, ...], dtype: str, *, num_shards: int) -> str:
    """Return the StableHLO module of an uninitialised buffer, sharded along its second dimension.

    Each chip allocates its own part (manual sharding, as in jax's shard_map).
    """

    def typed(second: int) -> str:
        return f"tensor<{'x'.join(map(str, (shape[0], second, *shape[2:])))}x{dtype}>"

    whole, part = typed(shape[1]), typed(shape[1] // num_shards)
    tiles = ",".join(str(num_shards if dim == 1 else 1) for dim in range(len(shape)))
    manual = ' {mhlo.sharding = "{manual}"}' if num_shards > 1 else ""
    split = f'{{mhlo.sharding = "{{devices=[{tiles}]<=[{num_shards}]}}"}}'
    lines = [f"%0 = stablehlo.custom_call @AllocateBuffer(){manual} : () -> {part}"]
    if num_shards > 1:
        lines.append(f"%1 = stablehlo.custom_call @SPMDShardToFullShape(%0) {split} : ({part}) -> {whole}")
    lines.append(f"return %{len(lines) - 1} : {whole}")
    return f"module {{ func.func @main(%arg0: tensor<i32>) -> {whole} {{\n" + "\n".join(lines) + "\n} }"


def stacks_made_by(make: Unwritten) -> AbstractContextManager[Any]:
    """Have torch_xla's scan allocate its output stacks with `make`, in place of torch.zeros, while the block runs."""
    return replaced(torch_xla_scan, "torch", _TorchWithStacks(make))


class _TorchWithStacks:
    """torch, as far as torch_xla's scan uses it, with another `zeros`."""

    def __init__(self, make: Unwritten) -> None:
        self.make = make

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Allocate a stack: `make`'s tensor, or zeros where it returns None."""
        made = self.make(tuple(shape), dtype)
        return torch.zeros(shape, device=device, dtype=dtype) if made is None else made
