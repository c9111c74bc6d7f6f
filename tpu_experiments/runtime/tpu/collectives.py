"""Sums and gathers over chips in TorchTPU's graphs, where every chip has a process and runs the program on its rows.

TorchTPU lowers a collective only in a process group of TPUs (torch_tpu 0.2.0: "No backend type associated with device
type tpu"), so each goes in as the StableHLO that XLA has for it. Weights that the sharding table splits are arguments
of one chip's size, and `gather_when_used` has each gathered where it is first computed with: one layer's at a time in
a loop, forward and backward (ZeRO-3, arXiv 1910.02054; FSDP2 does the same).
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.scan import scan_op

from tpu_experiments.config.mesh import Axes, Mesh
from tpu_experiments.runtime.kernels.on_torchtpu import spliced

SUM, GATHER = "tpu_experiments.sum_over_chips.default", "tpu_experiments.gather_over_chips.default"
"""The operators of this file, as a traced graph names them."""
SAME_ON_A_PART = ("aten.detach.default", "aten.alias.default", "aten.clone.default", "aten._to_copy.default")
"""Operators that do to a part of a tensor what they do to the whole."""
TYPES = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "int32": "i32",
    "int64": "i64",
    "int8": "i8",
    "uint8": "ui8",
}
Groups = tuple[tuple[int, ...], ...]
"""Numbers of the chips that exchange with each other, in the order of their parts."""


@torch.library.custom_op("tpu_experiments::sum_over_chips", mutates_args=())
def _sum(tensor: Tensor) -> Tensor:
    raise AssertionError("tensors of the meta device have no values to sum")


@torch.library.custom_op("tpu_experiments::gather_over_chips", mutates_args=())
def _gather(tensor: Tensor, dim: int, axis: str) -> Tensor:
    raise AssertionError("it is put into graphs alone")


@_sum.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


def sum_over_chips(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Sum each tensor over all chips."""
    return [_sum(tensor.detach()) for tensor in tensors]


def part_shape(shape: tuple[int, ...], axes: Axes, *, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of one chip's part of a tensor that is split over these axes."""
    named = (*mesh.named(axes), *(None for _ in shape))
    return tuple(size // mesh.size(axis) for size, axis in zip(shape, named, strict=False))


def gather_when_used(graph: fx.GraphModule, split: Mapping[fx.Node, Axes]) -> None:
    """Gather inputs of a graph that hold one chip's part where the graph computes with them, in place.

    Slices of a stack stay parts until the body of their loop computes with them.

    Args:
        split: axes of the inputs' dimensions.
    """
    for node, axes in split.items():
        _gather_uses(graph, node, axes, after=list(graph.graph.find_nodes(op="placeholder"))[-1])
    graph.recompile()


def _gather_uses(graph: fx.GraphModule, part: fx.Node, axes: Axes, *, after: fx.Node) -> None:
    whole: fx.Node | None = None
    for user in list(part.users):
        if str(user.target) in SAME_ON_A_PART:
            _gather_uses(graph, user, axes, after=user)
        elif user.target is scan_op and not axes[0] and _is_sliced_alone(part, user):
            body, carry, xs, _ = scan_arguments(user)
            inner: Any = getattr(graph, str(body.target))
            inputs = list(inner.graph.find_nodes(op="placeholder"))
            places = [len(carry) + index for index, x in enumerate(xs) if x is part]
            gather_when_used(inner, {inputs[place]: axes[1:] for place in places})
        else:
            whole = whole or _gathered(graph, part, axes, after=after)
            user.replace_input_with(part, whole)


def scan_arguments(node: fx.Node) -> Any:
    """Return body, carry, sliced tensors and other tensors of a call of torch's scan operator."""
    return node.args


def _is_sliced_alone(part: fx.Node, loop: fx.Node) -> bool:
    _, carry, xs, others = scan_arguments(loop)
    return part in xs and part not in (*carry, *others)


def _gathered(graph: fx.GraphModule, part: fx.Node, axes: Axes, *, after: fx.Node) -> fx.Node:
    """Add the operators that make a part whole behind `after`; return the last."""
    for dim, axis in enumerate(axes):
        if axis is not None:
            names = axis if isinstance(axis, str) else ",".join(axis)
            with graph.graph.inserting_after(after):
                part = after = graph.graph.call_function(
                    torch.ops.tpu_experiments.gather_over_chips.default, (part, dim, names)
                )
    return part


def lowered_collective(name: str, arguments: tuple[Any, ...], *, mesh: Mesh) -> Tensor:
    """Return the result of an operator of this file on TorchTPU's placeholders."""
    tensor, *how = arguments
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if name == SUM:
        text, result = _text_of_sum(shape, TYPES[dtype], num=mesh.num_devices), shape
    else:
        dim, axis = how
        groups = groups_of(mesh, tuple(axis.split(",")))
        result = (*shape[:dim], shape[dim] * len(groups[0]), *shape[dim + 1 :])
        text = _text_of_gather(shape, result, TYPES[dtype], dim=dim, groups=groups)
    (made,) = spliced(text, inputs=[tensor], results=((result, dtype),))
    return made


@functools.cache
def groups_of(mesh: Mesh, axes: tuple[str, ...]) -> Groups:
    """Return the groups of chips whose parts along these axes make a whole."""
    # Parts of the first dimension of two, copies along the other axes: part p of group g is devices[p * copies + g].
    split = mesh.split((axes,), ndim=1)
    return tuple(split.devices[copy :: split.copies] for copy in range(split.copies))


def _text_of_sum(shape: tuple[int, ...], dtype: str, *, num: int) -> str:
    of, scalar = _type(shape, dtype), f"tensor<{dtype}>"
    return _function(
        of,
        of,
        f"""    %sum = "stablehlo.all_reduce"(%x) <{{replica_groups = {_dense((tuple(range(num)),))}}}> ({{
    ^bb0(%a: {scalar}, %b: {scalar}):
      %both = stablehlo.add %a, %b : {scalar}
      stablehlo.return %both : {scalar}
    }}) : ({of}) -> {of}
    return %sum : {of}""",
    )


def _text_of_gather(shape: tuple[int, ...], result: tuple[int, ...], dtype: str, *, dim: int, groups: Groups) -> str:
    part, whole = _type(shape, dtype), _type(result, dtype)
    how = f"all_gather_dim = {dim} : i64, replica_groups = {_dense(groups)}"
    return _function(
        part,
        whole,
        f"""    %whole = "stablehlo.all_gather"(%x) <{{{how}}}> : ({part}) -> {whole}
    return %whole : {whole}""",
    )


def _function(argument: str, result: str, body: str) -> str:
    """Return the module of (result, once, argument) -> result, as `spliced` takes it."""
    return f"""module {{
  func.func @main(%before: {result}, %once: tensor<f32>, %x: {argument}) -> {result} {{
{body}
  }}
}}
"""


def _type(shape: tuple[int, ...], dtype: str) -> str:
    return f"tensor<{''.join(f'{size}x' for size in shape)}{dtype}>"


def _dense(groups: Groups) -> str:
    return f"dense<{[list(group) for group in groups]}> : tensor<{len(groups)}x{len(groups[0])}xi64>"
