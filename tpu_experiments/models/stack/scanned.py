"""A stack of layers as one loop forward and one loop backward, differentiable."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tpu_experiments.config.mesh import Axes
from tpu_experiments.models.stack.layer_graph import LayerGraph
from tpu_experiments.runtime.ops import BY_ROWS, Constrain, Folding, HostMemory, LoopCall, Tensors, in_use
from tpu_experiments.runtime.stacked import is_learnt_scale, is_magnitude, is_side_tensor

LAYER_INPUT = 0
"""Number of the hidden states among the inputs of a layer's graph."""
Fill = Callable[[Sequence[Tensor]], list[Tensor]]


def scan_layers(
    hidden: Tensor,
    weights: Sequence[dict[str, Tensor]],
    constants: tuple[Tensor, ...],
    *,
    graphs: Sequence[LayerGraph],
    fill: Sequence[Fill],
    splits: Sequence[Axes],
    folding: Folding,
    offload: bool = False,
) -> Tensor:
    """Run all layers in a loop and return the last hidden states.

    Args:
        weights: for every layer of the period, stacks by name.
        constants: what all layers receive; those that are computed from trained weights get the sum of the layers'
            gradients (DeBERTa's embedding of relative positions).
        graphs: for every layer of the period.
        fill: for every layer of the period, writes adapters into its gathered weights.
        splits: for every weight of one layer, the mesh axes along which it is sharded.
        offload: whether the layers' inputs are kept in host memory until the backward pass.
    """
    flat = [p for own in weights for p in own.values()]
    names = [name for own in weights for name in own]
    out: Tensor = _Layers.apply(
        _Scan(graphs, fill, splits, folding, offload, names), len(constants), hidden, *constants, *flat
    )
    return out


class _Scan:
    """Bodies of the forward and the backward loop."""

    def __init__(
        self,
        graphs: Sequence[LayerGraph],
        fill: Sequence[Fill],
        splits: Sequence[Axes],
        folding: Folding,
        offload: bool,
        names: Sequence[str],
    ) -> None:
        self.names, self.fill = names, fill
        self.graphs, self.splits, self.loop, self.constrain = graphs, splits, folding.loop, folding.constrain
        self.host = folding.host if offload else HostMemory()
        self.by_number = [
            number in graph.by_number
            for graph in graphs
            for number, source in enumerate(graph.saved_inputs)
            if source in (None, LAYER_INPUT)
        ]
        self.in_parts = [graph.in_parts.get(number) for graph in graphs for number in range(graph.num_weights)]
        self.is_numbered = any(self.by_number)

    def split(self, flat: Sequence[Any]) -> list[Sequence[Any]]:
        """Split a flat sequence into one part for each layer of the period."""
        parts, start = [], 0
        for graph in self.graphs:
            parts.append(flat[start : start + graph.num_weights])
            start += graph.num_weights
        return parts

    def forward_body(self, carry: Any, xs: Any, constants: Any) -> Any:
        (hidden,) = carry
        saved: list[Tensor] = []
        for graph, weights in zip(self.graphs, self._weights(xs), strict=True):
            out, *values = graph.forward(self.constrain(hidden, axes=BY_ROWS), *weights, *constants)
            for value, source in zip(values, graph.saved_inputs, strict=True):
                if source == LAYER_INPUT:
                    saved.append(self.host.put(value))
                elif source is None:
                    # DeBERTa divides by a number that it makes on the host.
                    saved.append(self._whole(_bool_to_uint8(value.to(hidden.device))))
            hidden = out
        return (self.constrain(hidden, axes=BY_ROWS),), tuple(saved)

    def _weights(self, xs: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the weights of every layer of the period as they are multiplied."""
        parts = self.split(gathered(xs, self.splits, constrain=self.constrain))
        return [fill(own) for fill, own in zip(self.fill, parts, strict=True)]

    def _whole(self, value: Tensor) -> Tensor:
        """Keep a saved vector (DoRA's norms) whole on every device.

        Without this constraint XLA splits it, and with it B and the products with B (Qwen2.5 0.5B on v5e-8, planned: 80
        instead of 67 ms a step).
        """
        return self.constrain(value, axes=(None,)) if value.ndim == 1 else value

    def backward(
        self,
        grad: Tensor,
        sums: Sequence[Tensor],
        *,
        weights: Sequence[Tensor],
        saved: Sequence[Tensor],
        constants: Any,
    ) -> tuple[Tensor, Tensors, Tensors]:
        """Run the backward loop; return the gradients of its input, of trained constants, and of weights, stacked.

        Args:
            sums: zeros like the trained constants.
        """
        pairs = list(zip(saved, self.by_number, strict=True))
        stacks, slices = ([s for s, by_number in pairs if by_number == whole] for whole in (True, False))
        count, device = len(weights[0]), weights[0].device
        numbers = [torch.arange(count, dtype=torch.int32, device=device)] if self.is_numbered else []
        (grad, *sums), grads = self.loop(
            LoopCall(
                self.backward_body,
                carry=(grad, *sums),
                xs=(*weights, *slices, *numbers),
                consts=(*constants, *stacks),
                reverse=True,
            )
        )
        return grad, tuple(sums), grads

    def backward_body(self, carry: Any, xs: Any, constants: Any) -> Any:
        grad, *added = carry
        num_weights = sum(graph.num_weights for graph in self.graphs)
        weights = self._weights(xs[:num_weights])
        splits, saved = self.split(self.splits), list(xs[num_weights:])
        num_stacks = sum(self.by_number)
        constants, stacks = constants[: len(constants) - num_stacks], list(constants[len(constants) - num_stacks :])
        layer = [saved.pop()] if self.is_numbered else []
        grads: list[Tensor] = []
        for graph, own, split in reversed(list(zip(self.graphs, weights, splits, strict=True))):
            inputs = (None, *own, *constants)
            values = []
            for number, source in reversed(list(enumerate(graph.saved_inputs))):
                if number in graph.by_number:
                    values.append(stacks.pop())
                elif source == LAYER_INPUT:
                    values.append(self.host.fetch(saved.pop()))
                else:
                    values.append(_uint8_to_bool(self._whole(saved.pop())) if source is None else inputs[source])
            given = [*reversed(values), self.constrain(grad, axes=BY_ROWS), *(layer if graph.by_number else ())]
            grad, *others = graph.backward(*given)
            # A sum for each part of the rows stays with the chips that have the part.
            axes_of = [BY_ROWS if number in graph.in_parts else axes for number, axes in enumerate(split)]
            of_weights = zip(others[: graph.num_weights], axes_of, strict=True)
            made = [self.constrain(g, axes=axes) if any(axes) else g for g, axes in of_weights if g is not None]
            grads = made + grads
            of_constants = [g for g in others[graph.num_weights :] if g is not None]
            added = [total + g for total, g in zip(added, of_constants, strict=True)]
        return (self.constrain(grad, axes=BY_ROWS), *added), tuple(grads)


def gathered(weights: Sequence[Tensor], splits: Sequence[Axes], *, constrain: Constrain) -> list[Tensor]:
    """Gather one layer's weights along all mesh axes but `tensor` (ZeRO-3, arXiv 1910.02054).

    Without this constraint XLA multiplies with one shard of the weight at a time while it fetches the next (collective
    matmul).
    """
    pairs = list(zip(weights, splits, strict=True))
    return [w if in_use(axes) == axes else constrain(w, axes=in_use(axes)) for w, axes in pairs]


def compute_dtype(weights: Iterable[Tensor], names: Iterable[str], *, like: Tensor) -> tuple[Tensor, ...]:
    """Cast weights to the data type that their layers compute in.

    Integers, scales of codes and DoRA's lengths of rows stay as they are.
    """
    stays = (is_side_tensor, is_magnitude, is_learnt_scale)
    return tuple(
        w.to(like.dtype) if w.is_floating_point() and not any(is_kept(name) for is_kept in stays) else w
        for w, name in zip(weights, names, strict=True)
    )


def _bool_to_uint8(value: Tensor) -> Tensor:
    """Cast bool to uint8 for the stack.

    torch_xla lowers a random bool tensor to float32, which does not go into a stack of bools.
    """
    return value.to(torch.uint8) if value.dtype == torch.bool else value


def _uint8_to_bool(value: Tensor) -> Tensor:
    return value.to(torch.bool) if value.dtype == torch.uint8 else value


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scan: _Scan, num_constants: int, hidden: Tensor, *rest: Tensor) -> Tensor:
        constants, kept = rest[:num_constants], rest[num_constants:]
        # Cast once, and before devices exchange shards. The graphs were traced for the stored weights: gradients are
        # float32 where the stored weights are.
        weights = compute_dtype(kept, scan.names, like=hidden)
        (out,), saved = scan.loop(
            LoopCall(scan.forward_body, carry=(hidden,), xs=weights, consts=constants, rows=hidden.shape[0])
        )
        ctx.scan, ctx.num_weights, ctx.num_constants = scan, len(weights), num_constants
        ctx.save_for_backward(*weights, *constants, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        tensors = ctx.saved_tensors
        weights, rest = tensors[: ctx.num_weights], tensors[ctx.num_weights :]
        constants, saved = rest[: ctx.num_constants], rest[ctx.num_constants :]
        wanted = ctx.needs_input_grad[3:]
        trained = [c for c, need in zip(constants, wanted, strict=False) if need]
        # Summed over the layers in float32: autograd would round the sum to the constant's type after every layer.
        zeros = [torch.zeros(c.shape, dtype=torch.float32, device=c.device) for c in trained]
        grad_hidden, sums, grads = ctx.scan.backward(
            grad,
            zeros,
            weights=weights,
            saved=saved,
            constants=constants,
        )
        # Added to what the loop over micro-batches carries, these sums over chips are made behind that loop, too (XLA's
        # WhileLoopAllReduceCodeMotion).
        factors = [factor for factor, need in zip(ctx.scan.in_parts, wanted[len(constants) :], strict=True) if need]
        grads = tuple(g if factor is None else (g * factor).sum(1) for g, factor in zip(grads, factors, strict=True))
        given = iter([*(s.to(c.dtype) for s, c in zip(sums, trained, strict=True)), *grads])
        return (None, None, grad_hidden, *(next(given) if need else None for need in wanted))
