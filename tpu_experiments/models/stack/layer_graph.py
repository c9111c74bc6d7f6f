"""Forward and backward pass of one layer as two graphs, with a choice of what is saved between them.

AOTAutograd traces both together; the partition decides what the forward pass saves and what the backward pass
recomputes (activation checkpointing, arXiv 1604.06174; by names, as jax.checkpoint_policies.save_only_these_names).
"""

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import (
    _extract_fwd_bwd_modules,
    _extract_fwd_bwd_outputs,
    _is_primal,
    default_partition,
)

from tpu_experiments.config.model_schema import SAVED, keeps_output
from tpu_experiments.models.parts.named import LOW, NAMED, named
from tpu_experiments.runtime.kernels.attention import BACKWARD
from tpu_experiments.runtime.kernels.contraction import CONTRACTION
from tpu_experiments.runtime.ops import APART

READ_AS_THEY_ARE = (LOW, "attention", "down_proj")
"""Saved values that are not read behind a barrier, as other projections are. Where a norm reads a layer's down_proj, it
costs more than it saves (Gemma 3 270M on colab, planned: 1.306 and 1.301 s a step)."""
AS_THEY_ARE = ("view", "_unsafe_view", "clone", "alias")
VIEW = torch.ops.aten.view.default
VIEWS = (VIEW, torch.ops.aten.alias.default, torch.ops.aten.detach.default, torch.ops.aten.transpose.int)
MUL = torch.ops.aten.mul.Tensor
PIECES = (*VIEWS, torch.ops.aten.slice.Tensor, torch.ops.aten._to_copy.default, MUL)
SUM = torch.ops.aten.sum.dim_IntList
SAME_NUMBERS = {NAMED, *(getattr(torch.ops.aten, name).default for name in AS_THEY_ARE)}


@dataclass(frozen=True)
class LayerGraph:
    """One layer, differentiated. Inputs are (hidden, *weights, *constants), flattened."""

    forward: Callable[..., Sequence[Any]]
    """Maps the inputs to (output, *saved)."""
    backward: Callable[..., Sequence[Any]]
    """Maps (*saved, gradient of the output) to the gradients of the inputs, None for inputs without one."""
    saved_inputs: tuple[int | None, ...]
    """For each saved value the number of the input that it is; None where it was computed."""
    num_weights: int
    by_number: frozenset[int] = frozenset()
    """Saved values, by number, that the backward pass takes as the stack of all layers; the layer's number then comes
    last, behind the gradient of the output."""
    in_parts: Mapping[int, float] = field(default_factory=dict)
    """Weights, by number, whose gradient has one sum for each part of the rows, (parts, ...). The caller multiplies
    them by this number, the scale of an adapter's A, and adds them."""

    @staticmethod
    def trace(
        compute: Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor],
        template: nn.Module,
        hidden: Tensor,
        weights: Sequence[Tensor],
        constants: Sequence[Tensor],
        *,
        remat: str,
        saved: Sequence[str] = (),
        parts: int = 1,
        summed_in_parts: Sequence[int] = (),
    ) -> "LayerGraph":
        """Trace `compute` for tensors of these shapes and data types.

        Args:
            weights: stacks, of which one slice is a layer's.
            remat: policy of what is saved, by name.
            saved: names saved in addition.
            parts: those that devices split the rows into.
            summed_in_parts: numbers of the weights whose gradients the caller sums over these parts.
        """
        examples = [
            torch.empty_like(hidden, requires_grad=True),
            *(torch.empty_like(w[0], requires_grad=w.requires_grad) for w in weights),
            *(torch.empty_like(c, requires_grad=c.requires_grad) for c in constants),
        ]
        count = len(weights)

        def flat(*inputs: Tensor) -> Tensor:
            return compute(inputs[0], inputs[1 : 1 + count], inputs[1 + count :])

        graphs: list[fx.GraphModule] = []
        cut = partition(remat, saved)

        def record(*args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
            graphs.extend(cut(*args, **kwargs))
            return graphs[0], graphs[1]

        traced = aot_function(flat, fw_compiler=not_run, partition_fn=record)
        with torch.enable_grad(), naming(template), warnings.catch_warnings():
            # An operator that loses its gradient, as `where` with a number does on the meta device, only warns.
            warnings.filterwarnings("error", message=".*an autograd kernel was not registered")
            traced(*examples)
        forward, backward = graphs
        read_apart(forward)
        results: Any = forward.graph.output_node().args[0]
        inputs = {node: n for n, node in enumerate(forward.graph.find_nodes(op="placeholder"))}
        sources = tuple(inputs.get(node) for node in results[1:])
        parted = in_parts(backward, parts, {number + 1 for number in summed_in_parts}) if parts > 1 else {}
        factors = {place - 1: factor for place, factor in parted.items()}
        return LayerGraph(forward, backward, sources, count, read_by_number(backward, sources), factors)


def read_apart(forward: fx.GraphModule) -> None:
    """Have a layer read its saved projections, but those of `READ_AS_THEY_ARE`, behind a barrier, in place.

    The product that computes one then writes it into its stack as well. Otherwise XLA computes what reads the
    projection in that product, and the projection itself once more for the stack, from arrays of its size: 250 of the
    4,580 us of a layer of Mistral 7B on v6e-8 (tests/benchmarks/RESULTS.md).
    """
    output = forward.graph.output_node()
    results: Any = output.args[0]
    for node in dict.fromkeys(results[1:]):
        if not isinstance(node, fx.Node) or node.target is not NAMED or node.args[1] in READ_AS_THEY_ARE:
            continue
        readers = [user for user in node.users if user is not output]
        if readers:
            with forward.graph.inserting_after(node):
                behind = forward.graph.call_function(APART, (node,))
            for user in readers:
                user.replace_input_with(node, behind)
    forward.recompile()


def in_parts(backward: fx.GraphModule, parts: int, wanted: set[int]) -> dict[int, float]:
    """Have a graph return sums over tokens as one for each part of the rows, in place.

    XLA adds up what the chips that split the rows have summed where it is summed: for a layer's gradients, inside the
    loop over layers. Of these sums each chip keeps its own, and what is behind the loop adds them: 4 all-reduces a step
    of Mistral 7B on v6e-8 in the place of 128 (tests/benchmarks/RESULTS.md).

    Args:
        parts: those that devices split the rows into.
        wanted: places of the results that may be.

    Returns:
        By place, the number that the graph multiplied such a result by, or 1, and no longer does: in a loop a product
        does not write what is multiplied (Mistral 7B, 16 x 4,096 on v6e-8: 14,401 instead of 14,627 tokens/s).
    """
    output = backward.graph.output_node()
    found: dict[int, float] = {}
    for node in list(backward.graph.nodes):
        places = places_of(node, output) if node.target in (CONTRACTION, SUM) else []
        if not places or not wanted.issuperset(places):
            continue
        count = 2 if node.target is CONTRACTION else 1
        given: Any = node.args
        operands, dims, others = given[:count], given[count : 2 * count], given[2 * count :]
        sizes = [operand.meta["val"].shape for operand in operands]
        if any(0 not in of or size[0] % parts for of, size in zip(dims, sizes, strict=True)):
            continue
        # XLA merges the dimensions of a product in parts, and heads with their features by a copy.
        if node.target is CONTRACTION and any(len(size) > len(of) + 1 for of, size in zip(dims, sizes, strict=True)):
            continue
        with backward.graph.inserting_before(node):
            split = [
                backward.graph.call_function(VIEW, (operand, [parts, size[0] // parts, *size[1:]]))
                for operand, size in zip(operands, sizes, strict=True)
            ]
        results: Any = output.args[0]
        found |= {place: factor_of(results[place], node) for place in places}
        for piece in pieces_of(node):
            if piece.target is MUL:
                piece.replace_all_uses_with(piece.all_input_nodes[0])
                backward.graph.erase_node(piece)
            else:
                piece.args = with_parts(piece, parts)
        moved = [[dim + 1 if dim >= 0 else dim for dim in of] for of in dims]
        node.args = (*split, *moved, *([True] if node.target is CONTRACTION else others))
    backward.recompile()
    return found


def factor_of(piece: fx.Node, node: fx.Node) -> float:
    """Return the number that a view, slice or multiple of a node is the node multiplied by."""
    factor = 1.0
    while piece is not node:
        given: Any = piece.args
        factor *= given[1] if piece.target is MUL else 1.0
        piece = given[0]
    return factor


def with_parts(piece: fx.Node, parts: int) -> tuple[Any, ...]:
    """Return the arguments of a view or a slice whose operand gets one more dimension, its first."""
    given: Any = piece.args
    operand, *rest = given
    if piece.target is VIEW:
        return operand, [parts, *rest[0]]
    if piece.target is torch.ops.aten.slice.Tensor:
        return operand, *(dim + 1 if dim >= 0 else dim for dim in rest[:1] or [0]), *rest[1:]
    if piece.target is torch.ops.aten.transpose.int:
        return operand, *(dim + 1 if dim >= 0 else dim for dim in rest)
    return operand, *rest


def places_of(node: fx.Node, output: fx.Node) -> list[int]:
    """Return the places of the results that are a node's numbers, or part of them; none if it is used otherwise."""
    pieces = [node, *pieces_of(node)]
    if any(user is not output and user not in pieces for piece in pieces for user in piece.users):
        return []
    results: Any = output.args[0]
    return [place for place, made in enumerate(results) if made in pieces]


def pieces_of(node: fx.Node) -> list[fx.Node]:
    """Return the views, slices and multiples of a node, and those of them in turn."""
    pieces = [user for user in node.users if user.target in PIECES and len(user.all_input_nodes) == 1]
    return [*pieces, *(piece for own in pieces for piece in pieces_of(own))]


def read_by_number(backward: fx.GraphModule, sources: Sequence[int | None]) -> frozenset[int]:
    """Have attention take saved queries, keys and values as stacks of all layers, in place; return their numbers.

    A kernel reads a layer's blocks out of a stack; otherwise XLA copies the layer out of it first, since a kernel is
    opaque to it: 10 of the 860 ms of Mistral 7B's step on v5e-8 (tests/benchmarks/RESULTS.md).
    """
    placeholders = list(backward.graph.find_nodes(op="placeholder"))
    calls = backward.graph.find_nodes(op="call_function", target=BACKWARD)
    if len(calls) != 1:
        return frozenset()
    saved, *others = calls[0].args
    found = [source_of(node) for node in saved[:3]]
    numbers = [placeholders.index(node) for node in found if node is not None]
    if len(numbers) < len(found) or any(number >= len(sources) or sources[number] is not None for number in numbers):
        return frozenset()
    with backward.graph.inserting_after(placeholders[-1]):
        layer = backward.graph.placeholder("layer")
    with backward.graph.inserting_before(calls[0]):
        shapes = [[-1, *node.meta["val"].shape] for node in saved[:3]]
        stacks = [backward.graph.call_function(VIEW, pair) for pair in zip(found, shapes, strict=True)]
    calls[0].args = ([*stacks, *saved[3:], layer], *others)
    backward.graph.eliminate_dead_code()
    backward.recompile()
    return frozenset(numbers)


def source_of(node: fx.Node) -> fx.Node | None:
    """Return the placeholder that a node is a view of, features as they are and tokens in order; else None.

    None, too, where something else reads the placeholder.
    """
    views, width = [], node.meta["val"].shape[-1]
    while node.target in VIEWS and len(node.users) == 1:
        views.append(node)
        node = node.all_input_nodes[0]
    if node.op != "placeholder" or len(node.users) != 1:
        return None
    seen = torch.empty(node.meta["val"].shape, device="meta")
    for view in reversed(views):
        seen = view.target(seen, *view.args[1:])  # type: ignore[operator]  # an operator
    return node if seen.is_contiguous() and node.meta["val"].shape[-1] == width else None


def not_run(graph: fx.GraphModule, _: Any) -> Callable[..., list[Any]]:
    """Return a function that yields empty results instead of running a traced graph.

    Running it once would draw random numbers, and the first step of a run would then be another program than the
    second.
    """
    (results,) = graph.graph.output_node().args
    likes = [node.meta["val"] if isinstance(node, fx.Node) else None for node in results]  # type: ignore[union-attr]

    @make_boxed_func
    def empty(*_: Any) -> list[Any]:
        return [v if v is None else torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in likes]

    return empty


@contextmanager
def naming(layer: nn.Module) -> Iterator[None]:
    """Name the values of a layer's projections and attention inside the block.

    A projection with `names_its_products` names what the backward pass needs of it in the place of its output.
    """
    handles: list[Any] = []
    for name, part in layer.named_modules():
        leaf = name.rpartition(".")[2]
        if is_projection(part) and not getattr(part, "names_its_products", False):
            handles.append(part.register_forward_hook(lambda _m, _i, out, leaf=leaf: named(out, leaf)))
        if leaf == "o_proj":
            handles.append(
                part.register_forward_pre_hook(lambda _m, inputs: (named(inputs[0], "attention"), *inputs[1:]))
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_projection(part: nn.Module) -> bool:
    """Return whether a module is a Linear, in whatever form: with an adapter, quantised, or GPT-2's Conv1D."""
    return hasattr(part, "out_features") or hasattr(part, "nf")


def partition(remat: str, saved: Sequence[str]) -> Callable[..., tuple[fx.GraphModule, fx.GraphModule]]:
    """Return the function by which AOTAutograd cuts the joint graph, for a remat policy."""
    if remat == "none":
        return default_partition
    names = {LOW, *SAVED[remat], *saved}

    def cut(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **_rest: Any) -> Any:
        outputs = _extract_fwd_bwd_outputs(joint, num_fwd_outputs=num_fwd_outputs)[0]
        forward = ancestors(outputs)
        # The backward pass may read inputs that the forward pass does not: B, where a weight holds it (padded.py).
        kept = [n for n in joint.graph.nodes if _is_primal(n) or (n in forward and is_kept(n, names))]
        values = [v for node in kept for v in (node.users if is_tuple(node) else [node])]
        values = [v for v in values if origin(v) is v or origin(v) not in values]
        return _extract_fwd_bwd_modules(joint, values, saved_sym_nodes=[], num_fwd_outputs=num_fwd_outputs)

    return cut


def ancestors(nodes: Sequence[Any]) -> set[fx.Node]:
    """Return every node that these are computed from, themselves included."""
    found: set[fx.Node] = set()
    waiting = [node for node in nodes if isinstance(node, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def is_kept(node: fx.Node, names: set[str]) -> bool:
    """Return whether the forward pass saves a node: by name, as attention's own, or because it is random."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return True
    if target is NAMED:
        return keeps_output(names, projection=str(node.args[1]))
    return "attention" in names and "attention" in target.name()


def origin(node: fx.Node) -> fx.Node:
    """Return the node that computed these numbers, following views and copies back.

    For example, the input of o_proj originates in the output of the attention kernel.
    """
    while node.target in SAME_NUMBERS:
        node = node.all_input_nodes[0]
    return node


def is_tuple(node: fx.Node) -> bool:
    """Return whether a node has several results, which `getitem` takes apart."""
    return bool(node.users) and all(user.target is operator.getitem for user in node.users)
