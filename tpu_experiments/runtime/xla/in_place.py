"""Writing into a part of a tensor, in its own buffer.

torch_xla makes of `slice_scatter`, which an assignment to a slice becomes, a choice between two whole tensors: for six
weights of Mistral 7B it took 1.6 ms, and copies of all of them into another layout 86 ms of a step (planned for v6e-8).
XLA's own operation writes the part alone. What is written into whole need not be filled before (`uninitialised`).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_builder as xb
from torch import Tensor

from tpu_experiments.config.mesh import Axes, Mesh
from tpu_experiments.runtime.ops import in_use, widened, with_slot, written

NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.uint8: "ui8",
    torch.int32: "i32",
}
"""StableHLO's names of types."""
TYPES = {torch.bfloat16: xb.Type.BF16, torch.float16: xb.Type.F16, torch.float32: xb.Type.F32}


@dataclass
class XlaInPlace:
    """See `InPlace` (runtime/ops.py)."""

    mesh: Mesh
    """Devices over which parameters are sharded by `axes`."""
    axes: Callable[[str, tuple[int, ...]], Axes]
    uninitialised_parts: int = 0
    kept: dict[str, Tensor] = field(default_factory=dict)

    def is_whole(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether every device has the whole parameter."""
        return self.mesh.parts(self.axes(name, shape)) == 1

    def is_gathered(self, name: str, shape: tuple[int, ...], *, along: int) -> bool:
        """Return whether a loop over layers gathers the whole parameter, which is not split along a dimension."""
        axes = self.axes(name, shape)
        return self.mesh.size(axes[along]) == self.mesh.parts(in_use(axes)) == 1


@written.register_kernel("xla")
def _(into: Tensor, part: Tensor, at: Sequence[int]) -> Tensor:
    computation = _computation(tuple(into.shape), tuple(part.shape), into.dtype, tuple(at))
    made: list[Tensor] = torch_xla._XLAC._xla_user_computation("xla::written", [into, part], computation)
    return made[0]


@with_slot.register_kernel("xla")
def _(into: Tensor, part: Tensor, slot: Tensor, dim: int) -> Tensor:
    computation = _computation_at(tuple(into.shape), tuple(part.shape), into.dtype, dim)
    made: list[Tensor] = torch_xla._XLAC._xla_user_computation("xla::with_slot", [into, part, slot], computation)
    return made[0]


@functools.cache
def _computation_at(whole: tuple[int, ...], part: tuple[int, ...], dtype: torch.dtype, dim: int) -> object:
    def with_slot(into: xb.Op, part: xb.Op, slot: xb.Op) -> xb.Op:
        zero = xb.Op.scalar(into.builder(), 0, dtype=xb.Type.S32)
        return into.dynamic_update_slice(part, [slot.reshape(()) if d == dim else zero for d in range(len(whole))])

    shapes = [xb.Shape.create(TYPES[dtype], shape) for shape in (whole, part)]
    return xb.create_computation("with_slot", with_slot, [*shapes, xb.Shape.create(xb.Type.S32, (1,))])


@widened.register_kernel("xla")
def _(tensor: Tensor, columns: int, parts: int) -> Tensor:
    shape = (*tensor.shape[:-1], tensor.shape[-1] + columns)
    if not parts or shape[0] % parts:
        return F.pad(tensor, (0, columns))
    return written(uninitialised(shape, tensor.dtype, num_shards=parts, along=0), tensor, [0] * tensor.ndim)


@functools.cache
def _computation(whole: tuple[int, ...], part: tuple[int, ...], dtype: torch.dtype, start: tuple[int, ...]) -> object:
    def written(into: xb.Op, part: xb.Op) -> xb.Op:
        indices = [xb.Op.scalar(into.builder(), number, dtype=xb.Type.S32) for number in start]
        return into.dynamic_update_slice(part, indices)

    return xb.create_computation("written", written, [xb.Shape.create(TYPES[dtype], shape) for shape in (whole, part)])


def uninitialised(shape: tuple[int, ...], dtype: torch.dtype, *, num_shards: int, along: int) -> Tensor:
    """Return an uninitialised tensor, sharded along a dimension; only compilers for TPUs have the operation."""
    anchor = torch.zeros((), dtype=torch.int32, device=torch_xla.device())  # an operation needs an input
    computation = _allocation(shape, dtype, num_shards, along)
    made: list[Tensor] = torch_xla._XLAC._xla_user_computation("xla::unwritten", [anchor], computation)
    return made[0]


@functools.cache
def _allocation(shape: tuple[int, ...], dtype: torch.dtype, num_shards: int, along: int) -> object:
    from jax._src.lib import xla_client

    text = stablehlo(shape, NAMES[dtype], num_shards=num_shards, along=along)
    computation = xla_client._xla.mlir.mlir_module_to_xla_computation(text, use_tuple_args=False, return_tuple=False)
    return xb.computation_from_module_proto("unwritten", computation.as_serialized_hlo_module_proto())


def stablehlo(shape: tuple[int, ...], dtype: str, *, num_shards: int, along: int) -> str:
    """Return the StableHLO module of an uninitialised buffer, sharded along a dimension.

    Each chip allocates its own part (manual sharding, as in jax's shard_map).
    """

    def typed(size: int) -> str:
        return f"tensor<{'x'.join(map(str, (*shape[:along], size, *shape[along + 1 :])))}x{dtype}>"

    whole, part = typed(shape[along]), typed(shape[along] // num_shards)
    tiles = ",".join(str(num_shards if dim == along else 1) for dim in range(len(shape)))
    manual = ' {mhlo.sharding = "{manual}"}' if num_shards > 1 else ""
    split = f'{{mhlo.sharding = "{{devices=[{tiles}]<=[{num_shards}]}}"}}'
    lines = [f"%0 = stablehlo.custom_call @AllocateBuffer(){manual} : () -> {part}"]
    if num_shards > 1:
        lines.append(f"%1 = stablehlo.custom_call @SPMDShardToFullShape(%0) {split} : ({part}) -> {whole}")
    lines.append(f"return %{len(lines) - 1} : {whole}")
    return f"module {{ func.func @main(%arg0: tensor<i32>) -> {whole} {{\n" + "\n".join(lines) + "\n} }"
