"""The loop under TorchTPU: torch's `scan` operator, which TorchTPU lowers to one While operation."""

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.utils import reenter_make_fx, unique_graph_id
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, track_tensor_tree
from torch.utils._pytree import tree_flatten, tree_map

from tpu_experiments.runtime.ops import LoopCall, Tensors, detached

REVERSED = "torch_tpu_scan_reverse"
"""TorchTPU's key in `node.meta["custom"]` of a body that runs backwards (torch_tpu 0.2.0, compile/scan.py)."""


def traced_loop(call: LoopCall) -> tuple[Tensors, Tensors]:
    """Run a loop as one operator of the graph that make_fx is tracing.

    The body may use tensors that it closes over: they are found in its graph and become inputs of the operator, which
    refuses any others.
    """
    num = len(call.order)
    carry, xs, consts = detached(call.carry), detached(call.xs), detached(call.consts)

    def flat(*tensors: Tensor) -> list[Tensor]:
        own, slices = tensors[: len(carry)], tensors[len(carry) : len(carry) + len(xs)]
        with torch.no_grad():
            new, ys = call.body(own, slices, tensors[len(carry) + len(xs) :])
        # The operator refuses an output that is an input or comes twice.
        return [t.detach().clone() for t in (*new, *ys)]

    mode = get_proxy_mode()
    with disable_proxy_modes_tracing():
        like = [torch.empty_like(t) for t in (*carry, *(x[0] for x in xs), *consts)]
        body = None if mode is None else reenter_make_fx(flat)(*like)
        results = flat(*like) if body is None else results_of(body)
        made = [torch.empty(new.shape, dtype=new.dtype, device="meta") for new in results[: len(carry)]]
        stacks = [torch.empty((num, *y.shape), dtype=y.dtype, device="meta") for y in results[len(carry) :]]
    found = [*made, *stacks]
    if mode is not None and body is not None:
        closed = lift_constants(body)
        if call.reverse:
            for node in body.graph.nodes:
                node.meta["custom"] = {**node.meta.get("custom", {}), REVERSED: True}
        found = _recorded(mode.tracer, body, list(carry), list(xs), (*consts, *closed), found=found)
    return tuple(found[: len(carry)]), tuple(found[len(carry) :])


def _recorded(tracer: Any, body: fx.GraphModule, *given: Any, found: list[Tensor]) -> list[Tensor]:
    """Record a call of torch's scan operator in the graph that is being traced, with these results.

    The operator's own tracing would trace the body once more and give fake tensors, which do not mix with those of the
    meta device.
    """
    _, name = unique_graph_id(get_proxy_mode(), prefix="scan_body")
    tracer.root.register_module(name, body)
    arguments = tree_map(tracer.unwrap_proxy, (body, *given))
    proxy = tracer.create_proxy("call_function", scan_op, arguments, {}, name="scan")
    recorded: list[Tensor] = track_tensor_tree(found, proxy, constant=None, tracer=tracer)
    return recorded


def results_of(body: fx.GraphModule) -> list[Tensor]:
    """Return fake tensors like the results of a traced body."""
    results: Any = body.graph.output_node().args[0]
    return [node.meta["val"] for node in results]


def lift_constants(graph: fx.GraphModule) -> list[Tensor]:
    """Turn the tensors that a traced graph holds into further inputs of it, in place; return them in that order."""
    found: list[Tensor] = []
    inputs: dict[int, fx.Node] = {}
    held: set[str] = set()
    last = list(graph.graph.find_nodes(op="placeholder"))[-1]
    for node in graph.graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(node.target)(graph)
        if not isinstance(value, Tensor):
            continue
        if id(value) not in inputs:
            with graph.graph.inserting_after(last):
                last = graph.graph.placeholder(f"closed_{len(found)}")
            last.meta["val"] = value
            inputs[id(value)] = last
            found.append(value)
        node.replace_all_uses_with(inputs[id(value)])
        graph.graph.erase_node(node)
        held.add(str(node.target))
    for name in held:
        delattr(graph, name)  # else a trace around this one takes the parameter for its own
    graph.graph.set_codegen(fx.graph.CodeGen())
    graph.recompile()
    return found


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a nested value, in order."""
    return [t for t in tree_flatten(value)[0] if isinstance(t, Tensor)]
