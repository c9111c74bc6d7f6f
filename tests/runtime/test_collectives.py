"""Sums and gathers of TorchTPU's graphs: which chips exchange, and where a graph makes a part whole."""

from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.scan import scan_op

from tpu_experiments.config.mesh import Mesh
from tpu_experiments.runtime.tpu.collectives import GATHER, gather_when_used, groups_of, part_shape


def test_chips_exchange_in_the_order_of_their_parts() -> None:
    mesh = Mesh(data=2, fsdp=4)
    assert groups_of(mesh, ("fsdp",)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert groups_of(mesh, ("data",)) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert groups_of(mesh, ("data", "fsdp")) == (tuple(range(8)),)


def test_a_part_is_smaller_along_its_axes() -> None:
    mesh = Mesh(data=2, fsdp=4)
    assert part_shape((8, 16, 3), (None, "fsdp"), mesh=mesh) == (8, 4, 3)
    assert part_shape((8, 16), (("data", "fsdp"), None), mesh=mesh) == (1, 16)
    assert part_shape((), (), mesh=mesh) == ()


def graph_of(function: Any, *inputs: Tensor) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function)(*inputs)


def gathers(graph: fx.GraphModule) -> list[tuple[str, int]]:
    return [
        (str(node.args[0]), int(node.args[1]))  # type: ignore[arg-type]
        for node in graph.graph.nodes
        if str(node.target) == GATHER
    ]


def test_a_part_is_gathered_once_where_it_is_computed_with() -> None:
    graph = graph_of(
        lambda w, x: (x @ w.detach().to(torch.float64), x + w), torch.ones(4, 4), torch.ones(4, 4).double()
    )
    weight, _ = graph.graph.find_nodes(op="placeholder")
    gather_when_used(graph, {weight: (None, "fsdp")})
    # The copy is made of the part, and gathered by itself.
    assert gathers(graph) == [("w_1", 1), ("_to_copy", 1)]


def test_a_slice_of_a_stack_is_gathered_in_the_loop() -> None:
    body = graph_of(lambda hidden, w: [hidden @ w, w.sum()], torch.ones(2, 4), torch.ones(4, 4))
    graph = fx.Graph()
    hidden, stack, other = (graph.placeholder(name) for name in ("hidden", "stack", "other"))
    call = graph.call_function(scan_op, (graph.get_attr("body"), [hidden], [stack], []))
    second = graph.call_function(scan_op, (graph.get_attr("body"), [hidden], [other], [other]))
    graph.output((call, second))
    module = fx.GraphModule({"body": body}, graph)
    gather_when_used(module, {stack: (None, "fsdp", None)})
    assert gathers(module) == []
    assert gathers(body) == [("w_1", 0)]
    # Read as a whole by the loop too, a stack is gathered before it.
    gather_when_used(module, {other: (None, "fsdp", None)})
    assert gathers(module) == [("other", 1)]
