"""A stack of layers as a loop forward and a loop backward, differentiable."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpu_experiments.models.layer_graph import LayerGraph
from tpu_experiments.runtime.layout import Lay
from tpu_experiments.runtime.loop import Loop


def scan_layers(
    hidden: Tensor,
    weights: Sequence[dict[str, Tensor]],
    constants: tuple[Tensor, ...],
    *,
    graphs: Sequence[LayerGraph],
    loop: Loop,
    lay: Lay,
) -> Tensor:
    """Hidden states after all layers.

    Args:
        weights: of every layer of the period, stacks by name.
        graphs: of every layer of the period.
        lay: says how hidden states and their gradients lie between layers.
    """
    flat = [p for own in weights for p in own.values()]
    out: Tensor = _Layers.apply(_Scan(graphs, loop, lay), constants, hidden, *flat)
    return out


class _Scan:
    """The bodies of the two loops."""

    def __init__(self, graphs: Sequence[LayerGraph], loop: Loop, lay: Lay) -> None:
        self.graphs, self.loop, self.lay = graphs, loop, lay

    def split(self, flat: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Weights of every layer of the period."""
        parts, start = [], 0
        for graph in self.graphs:
            parts.append(flat[start : start + graph.num_weights])
            start += graph.num_weights
        return parts

    def forward_body(self, carry: Any, xs: Any, constants: Any) -> Any:
        (hidden,) = carry
        saved: list[Tensor] = []
        for graph, weights in zip(self.graphs, self.split(xs), strict=True):
            out, *values = graph.forward(self.lay(hidden, rows_dim=0), *weights, *constants)
            saved += [_kept(v) for v, source in zip(values, graph.saved_inputs, strict=True) if not source]
            hidden = out
        return (self.lay(hidden, rows_dim=0),), tuple(saved)

    def backward_body(self, carry: Any, xs: Any, constants: Any) -> Any:
        (grad,) = carry
        num_weights = sum(graph.num_weights for graph in self.graphs)
        weights, saved = self.split(xs[:num_weights]), list(xs[num_weights:])
        grads: list[Tensor] = []
        for graph, own in reversed(list(zip(self.graphs, weights, strict=True))):
            inputs = (None, *own, *constants)
            values = []
            for source in reversed(graph.saved_inputs):
                values.append(inputs[source] if source else _unkept(saved.pop()))
            grad, *others = graph.backward(*reversed(values), self.lay(grad, rows_dim=0))
            grads = [g for g in others[: graph.num_weights] if g is not None] + grads
        return (self.lay(grad, rows_dim=0),), tuple(grads)


def _kept(value: Tensor) -> Tensor:
    """torch_xla lowers a drawn bool tensor to float32, which does not go into a stack of bools."""
    return value.to(torch.uint8) if value.dtype == torch.bool else value


def _unkept(value: Tensor) -> Tensor:
    return value.to(torch.bool) if value.dtype == torch.uint8 else value


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scan: _Scan, constants: tuple[Tensor, ...], hidden: Tensor, *weights: Tensor) -> Tensor:
        (out,), saved = scan.loop(scan.forward_body, carry=(hidden,), xs=weights, consts=constants)
        ctx.scan, ctx.num_weights, ctx.num_constants = scan, len(weights), len(constants)
        ctx.save_for_backward(*weights, *constants, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        tensors = ctx.saved_tensors
        weights, rest = tensors[: ctx.num_weights], tensors[ctx.num_weights :]
        constants, saved = rest[: ctx.num_constants], rest[ctx.num_constants :]
        (grad_hidden,), grads = ctx.scan.loop(
            ctx.scan.backward_body, carry=(grad,), xs=(*weights, *saved), consts=constants, reverse=True
        )
        given = iter(grads)
        wanted = ctx.needs_input_grad[3:]
        return (None, None, grad_hidden, *(next(given) if need else None for need in wanted))
