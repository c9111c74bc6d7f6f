"""Equal layers folded into one, with parameters stacked on a leading axis and run by a loop.

The compiler then sees one layer instead of all of them. Works for any transformers model whose layers repeat: every
layer (Mistral, Llama, Qwen2, DeBERTa), or with a period (Gemma 3: five layers with a sliding window, one without), from
the first or the second layer on (ModernBERT's first has no norm). Checkpoints and exports keep Hugging Face's names
(runtime/stacked.py).
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpu_experiments.config.mesh import Axes
from tpu_experiments.models.adapters.padded import (
    PaddedLora,
    padded_adapters,
    weights_with_adapters,
    with_adapters,
    with_padding,
)
from tpu_experiments.models.parts.bitnet import current_mix, mixed
from tpu_experiments.models.parts.dropout import current_noise, noise
from tpu_experiments.models.parts.float32_gradients import cast_weights
from tpu_experiments.models.stack.layer_graph import LayerGraph
from tpu_experiments.models.stack.scanned import Fill, compute_dtype, gathered, scan_layers
from tpu_experiments.runtime.ops import BY_ROWS, Folding, LoopCall

log = logging.getLogger(__name__)
NUMBER = "number of the layer"
"""Key of the layer's number, which passes through the loop like a weight, for dropout. The rows' random words are the
last of the constants then."""


def fold(
    module: nn.Module,
    folding: Folding,
    *,
    rehearse: Callable[[], None],
    remat: str,
    saved: Sequence[str] = (),
    group: int = 1,
) -> int:
    """Fold the layers of a module on the meta device in place; returns the layers per iteration.

    Every list of layers of one class is folded: DeBERTa's pre-training model has a generator and a discriminator.
    Layers are left as they are, and 0 is returned, where none repeat, where they return more than hidden states, or
    where the model computes something between them.

    Args:
        rehearse: runs the module on the meta device, as far as that can run it.
        remat: policy of what the forward pass saves for the backward pass (layer_graph.py).
        saved: names saved in addition.
        group: periods in one iteration, fewer where less than two iterations would remain.
    """
    lists = layer_lists(module)
    chains = chains_of(list(lists.values()), rehearse=rehearse)
    periods = [0]
    for (path, layers), chain in zip(lists.items(), chains, strict=True):
        start, period = repetition(layers, length=chain.length)
        if not period:
            log.info("%d layers of %s do not repeat: each is compiled separately", chain.length, path or "the model")
            continue
        period *= max(1, min(group, (chain.length - start) // (2 * period)))
        folded = FoldedLayers(
            layers,
            path=path,
            repeated=range(start, start + (chain.length - start) // period * period, period),
            folding=folding,
            remat=remat,
            saved=tuple(saved),
            num_empty=chain.num_empty,
        )
        parent, _, leaf = path.rpartition(".")
        setattr(module.get_submodule(parent), leaf, folded)
        periods.append(period)
    return max(periods)


@dataclass
class Chain:
    """The layers of a list that a model calls one by one, each once, each with what the one before returned."""

    length: int
    """Their number, from the first on."""
    num_empty: int | None = None
    """Number of Nones that a layer returns in a tuple behind its hidden states; None where it returns these alone."""


def chains_of(lists: Sequence[nn.ModuleList], *, rehearse: Callable[[], None]) -> list[Chain]:
    """Find out by a rehearsal how a model calls its layers; where the meta device runs none, as most models do."""
    calls: list[tuple[nn.Module, Any, Any]] = []

    def note(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        calls.append((layer, inputs[0] if inputs else None, output))

    hooks = [layer.register_forward_hook(note) for layers in lists for layer in layers]
    try:
        rehearse()
    finally:
        for hook in hooks:
            hook.remove()
    return [_chain(layers, calls) for layers in lists]


def _chain(layers: nn.ModuleList, calls: Sequence[tuple[nn.Module, Any, Any]]) -> Chain:
    own = [call for call in calls if any(call[0] is layer for layer in layers)]
    if not own:
        return Chain(len(layers))
    chain, previous = Chain(0), None
    for index, (layer, given, output) in enumerate(own):
        first, *others = output if isinstance(output, tuple) else (output,)
        is_next = index < len(layers) and layer is layers[index] and (previous is None or given is previous)
        is_again = any(layer is other[0] for other in own[index + 1 :])
        if not is_next or is_again or any(other is not None for other in others):
            break
        chain.length, previous = index + 1, first
        chain.num_empty = len(others) if isinstance(output, tuple) else None
    return chain


def layer_lists(module: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the ModuleList with the most parameters, and every other of layers of its class, by path."""
    path, largest = decoder_layers(module)
    if not len(largest):
        return {}
    kind = type(largest[0])
    lists = {name: part for name, part in module.named_modules() if isinstance(part, nn.ModuleList)}
    return {path: largest} | {n: part for n, part in lists.items() if len(part) and type(part[0]) is kind}


def decoder_layers(module: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the ModuleList with the most parameters, and its path."""
    lists = {name: part for name, part in module.named_modules() if isinstance(part, nn.ModuleList)}
    if not lists:
        return "", nn.ModuleList()
    path = max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()))
    return path, lists[path]


def repetition(layers: nn.ModuleList, *, length: int) -> tuple[int, int]:
    """Return the first layer that repeats, 0 or 1, and the smallest number of layers after which it does, 0 for none.

    Args:
        length: number of layers from the first on that may be folded.
    """
    kinds = [_kind(layer) for layer in layers[:length]]
    for start in (0, 1):
        own = kinds[start:]
        for period in range(1, len(own) // 2 + 1):
            whole = len(own) // period * period
            is_whole = whole == len(own) or not start  # only behind all the others may layers be left over
            if is_whole and all(own[index] == own[index % period] for index in range(whole)):
                return start, period
    return 0, 0


def _kind(layer: nn.Module) -> Any:
    """Return a value that is equal for layers that differ only in their weights.

    A layer with buffers is equal to no other.
    """
    parts = []
    for name, part in layer.named_modules():
        plain = {
            key: value
            for key, value in vars(part).items()
            if isinstance(value, str | int | float | bool | None) and key not in {"layer_idx", "training"}
        }
        own = [(key, tuple(p.shape), p.dtype, p.requires_grad) for key, p in part._parameters.items() if p is not None]
        parts.append((name, type(part), plain, own))
    if next(layer.buffers(), None) is not None:
        return id(layer)
    return parts


class FoldedLayers(nn.Module):
    """Replacement for the model's list of layers; the model's own loop calls its `LayerCall`s."""

    def __init__(
        self,
        layers: nn.ModuleList,
        *,
        path: str,
        repeated: range,
        folding: Folding,
        remat: str,
        saved: tuple[str, ...],
        num_empty: int | None,
    ) -> None:
        """Stack the layers on the meta device.

        Args:
            repeated: the first layer of each iteration; the step is the layers per iteration.
            num_empty: that of the layers' chain.
        """
        super().__init__()
        self.num_layers, self.path = len(layers), path
        self.start, self.stop, self.period = repeated.start, repeated.stop, repeated.step
        self.folding, self.remat, self.saved, self.num_empty = folding, remat, saved, num_empty
        self.graphs: dict[Any, LayerGraph] = {}
        for index in range(self.num_layers):
            if self.start <= index < self.start + self.period:
                self._stack(layers[index], count=len(repeated))
            if index < self.start + self.period or index >= self.stop:
                self.add_module(self._name(index), layers[index])
        self._calls = [LayerCall(self, index) for index in range(self.num_layers)]
        self._inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    @staticmethod
    def _stack(template: nn.Module, *, count: int) -> None:
        for part in template.modules():
            for name, p in part._parameters.items():
                if p is not None:
                    whole = torch.empty(count, *p.shape, dtype=p.dtype, device=p.device)
                    part._parameters[name] = nn.Parameter(whole, requires_grad=p.requires_grad)

    def __iter__(self) -> Iterator["LayerCall"]:
        return iter(self._calls)

    def __len__(self) -> int:
        return self.num_layers

    def __getitem__(self, index: Any) -> Any:
        return self._calls[index]

    def layer(self, index: int) -> nn.Module:
        """Return the module that computes layer `index`."""
        return self._modules[self._name(index)]  # type: ignore[return-value]

    def run(self, index: int, hidden: Tensor, rest: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Compute layer `index` for the model's own loop.

        Folded layers only record their inputs and return `hidden` unchanged, but for the last one, which runs the loop
        over all of them.
        """
        if not self.start <= index < self.stop:
            return self.layer(index)(hidden, *rest, **keywords)
        if index == self.start:
            self._inputs = []
        self._inputs.append((rest, keywords))
        if index == self.stop - 1:
            inputs, self._inputs = self._inputs, []
            hidden = self._run_loop(hidden, inputs)
        return hidden if self.num_empty is None else (hidden, *[None] * self.num_empty)

    def _run_loop(self, hidden: Tensor, inputs: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Tensor:
        constants, specs = _shared_constants(inputs, first=self.start, period=self.period)
        weights: list[dict[str, Tensor]] = [
            dict(self.layer(self.start + j).named_parameters()) for j in range(self.period)
        ]
        drawn, mix = current_noise(), current_mix()
        specs = [(*spec, None if mix is None else len(constants)) for spec in specs]
        constants = constants if mix is None else (*constants, mix)
        if drawn is not None:
            constants = (*constants, drawn.words_R)
            for j, own in enumerate(weights):
                numbers = range(self.start + j, self.stop, self.period)
                own[NUMBER] = torch.arange(
                    numbers.start, numbers.stop, numbers.step, dtype=torch.int32, device=hidden.device
                )
        if not torch.is_grad_enabled():
            return self._loop_forward(hidden, weights, constants=constants, specs=specs)
        written = weights_with_adapters()
        padded = [padded_adapters(self.layer(self.start + j)) for j in range(self.period)]
        for own, adapters in zip(weights, padded, strict=True):
            own |= {f"{name}.weight": written[p.path] for name, p in adapters.items() if p.path in written}
        holding = [
            {p.path: f"{name}.weight" for name, p in adapters.items() if p.is_gathered or p.path in written}
            for adapters in padded
        ]
        graphs = [
            self._graph(j, hidden, weights[j], holding=holding[j], constants=constants, spec=specs[j])
            for j in range(self.period)
        ]
        return scan_layers(
            hidden,
            weights,
            constants,
            graphs=graphs,
            fill=[self._filler(list(own), adapters) for own, adapters in zip(weights, padded, strict=True)],
            splits=self._splits(weights),
            folding=self.folding,
            offload=self.remat == "offload",
        )

    def _filler(self, names: list[str], padded: Mapping[str, PaddedLora]) -> Fill:
        """Return a function that writes a layer's adapters into its gathered weights."""
        gathered = {name: part for name, part in padded.items() if part.is_gathered}
        names_of = {id(part): name for name, part in gathered.items()}

        def filled(weights: Sequence[Tensor]) -> list[Tensor]:
            own = dict(zip(names, weights, strict=True))
            for name, adapter in gathered.items():
                values = adapter.values(lambda owner, part: own[f"{names_of[id(owner)]}.{part}"])
                own[f"{name}.weight"] = with_padding(own[f"{name}.weight"], values)
            return list(own.values())

        return filled

    def _splits(self, weights: list[dict[str, Tensor]], *, first: int = 0) -> list[Axes]:
        """Return for every weight of one layer the mesh axes along which it is sharded."""
        splits = []
        for j, own in enumerate(weights, start=first):
            for name, stack in own.items():
                whole = f"{self.path}.{self._name(self.start + j)}.{name}"
                splits.append(() if name == NUMBER else self.folding.axes(whole, tuple(stack.shape))[1:])
        return splits

    def _name(self, index: int) -> str:
        """Return the name of the module that computes layer `index`."""
        if not self.start <= index < self.stop:
            return str(index)
        return f"{self.start + (index - self.start) % self.period}:{self.stop}:{self.period}"

    def _loop_forward(
        self, hidden: Tensor, weights: list[dict[str, Tensor]], *, constants: tuple[Tensor, ...], specs: list[Any]
    ) -> Tensor:
        names = [list(w) for w in weights]
        constrain, splits = self.folding.constrain, self._splits(weights)

        def body(carry: Any, xs: Any, consts: Any) -> Any:
            (state,) = carry
            flat = iter(gathered(xs, splits, constrain=constrain))
            for j in range(self.period):
                own = {name: next(flat) for name in names[j]}
                state = call_layer(
                    self.layer(self.start + j), constrain(state, axes=BY_ROWS), own, consts, spec=specs[j]
                )
            return (constrain(state, axes=BY_ROWS),), ()

        stacks = compute_dtype(
            (p for w in weights for p in w.values()), (name for own in names for name in own), like=hidden
        )
        with with_adapters({}):  # inside a step they are stacks, which layers that compute no gradients do not take
            (out,), _ = self.folding.loop(LoopCall(body, carry=(hidden,), xs=stacks, consts=constants))
        return out

    def _graph(
        self,
        j: int,
        hidden: Tensor,
        weights: dict[str, Tensor],
        *,
        holding: Mapping[str, str],
        constants: tuple[Tensor, ...],
        spec: Any,
    ) -> LayerGraph:
        """Return the layer's forward and backward pass as graphs, traced once for each shape.

        Args:
            holding: names of the weights that hold their adapters, by the adapters' paths.
        """
        template = self.layer(self.start + j)
        tensors = (hidden, *weights.values(), *constants)
        key = (j, template.training, len(holding), tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors))
        if key not in self.graphs:
            names = list(weights)
            whole = [number for number, axes in enumerate(self._splits([weights], first=j)) if not any(axes)]

            def compute(hidden: Tensor, weights: Sequence[Tensor], constants: Sequence[Tensor]) -> Tensor:
                own = dict(zip(names, weights, strict=True))
                with with_adapters({path: own[name] for path, name in holding.items()}):
                    return call_layer(template, hidden, own, constants, spec=spec)

            self.graphs[key] = LayerGraph.trace(
                compute,
                template,
                hidden,
                list(weights.values()),
                constants,
                remat=self.remat,
                saved=self.saved,
                parts=self.folding.row_shards,
                summed_in_parts=whole,
            )
        return self.graphs[key]


class Layers(Protocol):
    """Replacement for the model's list of layers."""

    def layer(self, index: int) -> nn.Module:
        """Return the module that computes layer `index`."""

    def run(self, index: int, hidden: Tensor, rest: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Compute layer `index` for the model's own loop."""


class LayerCall:
    """One layer as the model's own loop calls it."""

    def __init__(self, layers: Layers, index: int) -> None:
        self._layers, self._index = layers, index

    def __call__(self, hidden: Tensor, *rest: Any, **keywords: Any) -> Any:
        return self._layers.run(self._index, hidden, rest, keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layers.layer(self._index), name)


def call_layer(
    template: nn.Module, hidden: Tensor, weights: Mapping[str, Tensor], constants: Sequence[Tensor], *, spec: Any
) -> Tensor:
    """Call one layer with `weights` in place of its own and its other inputs reassembled from `constants`."""
    structure, places, place_of_mix = spec
    leaves = [constants[place] if isinstance(place, int) else place[0] for place in places]
    rest, keywords = tree_unflatten(leaves, structure)
    own = dict(weights)
    number = own.pop(NUMBER, None)
    words = None if number is None else constants[-1]
    mix = None if place_of_mix is None else constants[place_of_mix]
    with noise(words, layer=number), mixed(mix), cast_weights(own, dtype=hidden.dtype) as cast:
        output = functional_call(template, cast, (hidden, *rest), keywords)
    return output[0] if isinstance(output, tuple) else output


def _shared_constants(
    inputs: list[tuple[tuple[Any, ...], dict[str, Any]]], *, first: int, period: int
) -> tuple[tuple[Tensor, ...], list[Any]]:
    """Collect every tensor that layers receive beside the hidden states, once.

    Returns:
        The tensors; and for every layer of the period (structure, leaves), a leaf being the number of a tensor or, in a
        tuple, a value that is no tensor.

    Raises:
        RuntimeError: a layer receives other inputs than the layer at the same place of the period.
    """
    constants: dict[int, tuple[int, Tensor]] = {}
    specs = []
    for rest, keywords in inputs:
        leaves, structure = tree_flatten((rest, keywords))
        places: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                number, _ = constants.setdefault(id(leaf), (len(constants), leaf))
                places.append(number)
            else:
                places.append((leaf,))
        specs.append((structure, places))
    for index, spec in enumerate(specs):
        if spec != specs[index % period]:
            layer, other = first + index, first + index % period
            raise RuntimeError(f"layer {layer} gets other inputs than layer {other}; set model.stack=unrolled")
    return tuple(tensor for _, tensor in constants.values()), specs[:period]
