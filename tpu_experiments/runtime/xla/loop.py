"""The loop on torch_xla: one While operation whose body is traced once, from placeholders; and what folded layers need.

It stands on the untracked half of torch_xla's scan (`_scan_impl_pytree`): the body is Python that runs once while the
program is traced, so it may hold autograd and loops of its own. torch_xla's `scan` itself traces its body with
AOTAutograd, at every step unless the same function comes again, and decides what to keep for the backward pass."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch_xla.core.xla_model as xm
import torch_xla.experimental.scan as torch_xla_scan
from torch import Tensor
from torch_xla.experimental import stablehlo_custom_call
from torch_xla.experimental.scan import _scan_impl_pytree

from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.mesh import Mesh
from tpu_experiments.runtime.ops import Folding, HostMemory, Loop, LoopCall, Tensors, apart, detached, unconstrained
from tpu_experiments.runtime.patches import patched_attribute
from tpu_experiments.runtime.sharding import ShardingTable
from tpu_experiments.runtime.xla.in_place import NAMES, XlaInPlace, uninitialised
from tpu_experiments.runtime.xla.layout import constraints_over

Unwritten = Callable[[tuple[int, ...], torch.dtype], Tensor | None]
"""Maps the shape and type of a stack to an uninitialised tensor; None where it has to be filled with zeros."""


def uninitialised_for(device: str, *, mesh: Mesh) -> Callable[[int], Unwritten] | None:
    """Return a function from the number of rows to the allocator of stacks; None: fill them with zeros.

    A stack of values with a leading row dimension is sharded as they are. None on devices other than a TPU, whose
    compilers lack the operation, and where `tensor` shards features: XLA decides which values that applies to, and
    a stack annotated as replicated along `tensor` would force an all-gather.
    """
    num_shards = _uninitialised_parts(device, mesh)
    if not num_shards:
        return None

    def for_rows(rows: int) -> Unwritten:
        def make(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
            if len(shape) < 2 or shape[1] % rows or rows % num_shards or dtype not in NAMES:
                return None
            return uninitialised(shape, dtype, num_shards=num_shards, along=1)

        return make

    return for_rows


def _uninitialised_parts(device: str, mesh: Mesh) -> int:
    """Return the parts that rows of uninitialised tensors are split into; 0 where there are no such tensors."""
    return mesh.num_shards if device.lower() == "tpu" and mesh.tensor == 1 else 0


def scan_stacks_from(make: Unwritten) -> AbstractContextManager[Any]:
    """Have torch_xla's scan allocate its output stacks with `make`, in place of torch.zeros, while the block runs."""
    return patched_attribute(torch_xla_scan, "torch", _TorchWithStacks(make))


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


def loop_for(device: str, *, mesh: Mesh) -> Loop:
    """Return the loop of programs for `device` that are sharded over the mesh."""
    return functools.partial(xla_loop, unwritten=uninitialised_for(device, mesh=mesh))


def xla_loop(call: LoopCall, *, unwritten: Callable[[int], Unwritten] | None = None) -> tuple[Tensors, Tensors]:
    """Run a loop as one While operation.

    `consts` are part of the carry and returned unchanged; XLA detects that and does not copy them.

    Args:
        unwritten: maps the number of rows to an allocator of uninitialised output stacks; None: filled with zeros.
    """
    carry_types, x_types, const_types = ([t.dtype for t in each] for each in (call.carry, call.xs, call.consts))

    def body(state: tuple[Tensors, Tensors], x: Tensors) -> tuple[tuple[Tensors, Tensors], Tensors]:
        fixed = _typed(state[1], const_types)
        new, y = call.body(_typed(state[0], carry_types), _typed(x, x_types), fixed)
        _check_types(new, carry_types)
        return (detached(new), fixed), detached(y)

    stacks = scan_stacks_from(unwritten(call.rows)) if unwritten and call.rows else nullcontext()
    # A gradient that autograd's device thread still holds at the next sync becomes an output of that program, which
    # then reads the body's placeholders: they have no buffer, and torch_xla 2.9 crashes (3 of 4 processes in 150 s).
    with torch.no_grad(), torch.autograd.set_multithreading_enabled(False), stacks:
        state = (detached(call.carry), detached(call.consts))
        (carry, _), ys = _scan_impl_pytree(body, state, detached(call.xs), reverse=call.reverse)
    return carry, ys


def _typed(tensors: Tensors, types: list[torch.dtype]) -> Tensors:
    """Restore dtypes: torch_xla calls the body with its arguments times 1, which turns bool into int64."""
    return tuple(t if t.dtype == dtype else t.to(dtype) for t, dtype in zip(tensors, types, strict=True))


def _check_types(carry: tuple[Tensor, ...], types: list[torch.dtype]) -> None:
    found = [t.dtype for t in carry]
    if found != types:
        raise TypeError(f"carry={types} comes back from the loop's body as {found}; it must keep its types")


def host_memory_for(device: str) -> HostMemory:
    """Return the transfers to and from host memory for `device`; the identity on every device but a TPU.

    They are annotations that XLA's host offloader reads. It moves the slices of a loop's stacked outputs while the
    loop computes (`dynamic-update-slice-start`).
    """
    if device.lower() != "tpu":
        return HostMemory()
    return HostMemory(put=_placed("pinned_host"), fetch=_placed("device"))


def _placed(memory: str) -> Any:
    def place(tensor: Tensor) -> Tensor:
        # The same call as torch_xla's place_to_host, without its operator, which registers a backward pass of its own.
        placed: Tensor = stablehlo_custom_call.stablehlo_custom_call(
            [tensor],
            "annotate_device_placement",
            [tensor.shape],
            [tensor.dtype],
            has_side_effect=True,
            frontend_attributes={"_xla_buffer_placement": memory},
        )
        return placed

    return place


@apart.register_kernel("xla")
def _(tensor: Tensor) -> Tensor:
    behind = tensor.clone()
    xm.optimization_barrier_([behind])
    return behind


def folding_on(device: str, *, hw: HwConfig, mesh: Mesh, table: ShardingTable) -> Folding:
    """Return the folding of programs for `device`; only `spmd` shards them over the mesh.

    Args:
        device: type of device, such as `tpu`, in either case.
    """
    if hw.parallel == "spmd":
        loop, constrain, shards = loop_for(device, mesh=mesh), constraints_over(mesh), mesh.num_shards
    else:
        mesh = Mesh()
        loop, constrain, shards = loop_for(device, mesh=mesh), unconstrained, 1
    in_place = XlaInPlace(mesh, table.axes, _uninitialised_parts(device, mesh))
    return Folding(loop, constrain, table.axes, host_memory_for(device), shards, in_place)
