"""Quantisation of a model layer by layer on the host, each layer with the inputs that the layers before it give.

A layer's Hessians, the means of x x^T over the inputs of its Linear modules, are taken from calibration rows (GPTQ,
arXiv 2210.17323, section 3). The rows then pass through the quantised layer, so that the next one is fitted to what it
will be given. One layer's weights are in memory at a time. What each layer gave is kept in a folder, and an interrupted
quantisation goes on at the layer where it was. Legend: R rows, T tokens, H hidden, N output, K input features."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tpu_experiments.export.weights import WholeModel
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.passes.forward import model_inputs
from tpu_experiments.models.stack.fold import LayerCall, decoder_layers
from tpu_experiments.quantisation.grid import proxy_error
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.tensors import chunks_of, tensors_in

log = logging.getLogger(__name__)
HIDDEN, ERRORS = "hidden_{}.safetensors", "layer_{:05d}.json"
"""Hidden states that the next layer is given, and the proxy errors of a layer's weights."""
Parts = Mapping[str, Tensor]


class Codes(Protocol):
    """How one weight is quantised."""

    needs_inputs: bool
    """Whether the Hessian is used, and with it calibration rows."""

    def encode(self, weight_NK: Tensor, hessian_KK: Tensor | None, *, seed: int) -> tuple[Parts, Tensor]:
        """Return the tensors that stand for a float32 weight, by the end of their names, and what they decode to."""
        ...


@dataclass
class Calibrated:
    """A quantised model's layers, in files of a folder."""

    folder: str
    count: int
    """Number of layers."""
    errors: dict[str, float] = field(default_factory=dict)
    """By weight, the part of its outputs that is lost (`proxy_error`); empty without calibration rows."""

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of all quantised weights, one layer's in memory at a time."""
        for index in range(self.count):
            yield from _read(paths.join(self.folder, layer_file(index))).items()


def layer_file(index: int) -> str:
    """Return the name of a layer's file."""
    return f"layer_{index:05d}.safetensors"


def calibrated(
    model: WholeModel,
    source: HuggingFaceModel,
    codes: Codes,
    *,
    chosen: Collection[str],
    rows: Sequence[Mapping[str, Tensor]],
    folder: str,
    seed: int,
) -> Calibrated:
    """Quantise the weights `chosen`, all of them in the model's layers.

    Args:
        source: of the model, for a module whose attention the host computes.
        rows: calibration rows (1, T) with `ids`, `positions` and `segments`; all of one length.
        folder: receives a file for each layer; holds those of an interrupted quantisation of the same weights.
    """
    module = source.empty().eval()
    path, layers = decoder_layers(module)
    runner = _Runner(module, path, layers, rows=rows if codes.needs_inputs else ())
    done = _layers_done(folder, needs_hidden=codes.needs_inputs)
    if done:
        log.info("%d of %d layers are quantised already", done, len(layers))
        if codes.needs_inputs and done < len(layers):
            runner.hidden_RTH = _read(paths.join(folder, HIDDEN.format(done)))["hidden"]
    waiting: dict[str, Tensor] = {}
    index, names = 0, _names_of(layers, 0, path)
    for name, tensor in model.tensors():
        if index == len(layers):
            break
        if name not in names:
            _put(module, name, tensor)
            continue
        waiting[name] = tensor
        if len(waiting) < len(names):
            continue
        if index >= done:
            _quantise_layer(index, waiting, runner, codes, chosen=chosen, folder=folder, seed=seed, module=module)
        waiting.clear()
        index += 1
        names = _names_of(layers, index, path) if index < len(layers) else set()
    found = Calibrated(folder, len(layers))
    for index in range(len(layers)):
        found.errors |= strict_json.loads(paths.read_bytes(paths.join(folder, ERRORS.format(index))))
    return found


def _names_of(layers: nn.ModuleList, index: int, path: str) -> set[str]:
    return {f"{path}.{index}.{name}" for name, _ in layers[index].named_parameters()}


def _layers_done(folder: str, *, needs_hidden: bool) -> int:
    """Return the number of layers, from the first on, whose files are all there."""
    names = set(paths.list_names(folder)) if paths.exists(folder) else set()
    done = 0
    while layer_file(done) in names and ERRORS.format(done) in names:
        done += 1
    while needs_hidden and done and HIDDEN.format(done) not in names:
        done -= 1
    return done


def _quantise_layer(
    index: int,
    weights: Mapping[str, Tensor],
    runner: "_Runner",
    codes: Codes,
    *,
    chosen: Collection[str],
    folder: str,
    seed: int,
    module: nn.Module,
) -> None:
    for name, tensor in weights.items():
        _put(module, name, tensor)
    linears = {name.removesuffix(".weight"): name for name in weights if name in chosen}
    hessians = runner.hessians(index, list(linears)) if codes.needs_inputs else {}
    parts: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    for number, (linear, name) in enumerate(linears.items()):
        hessian_KK = hessians.get(linear)
        made, decoded_NK = codes.encode(weights[name], hessian_KK, seed=seed + 1_000 * index + number)
        parts |= {f"{name}{end}": tensor.contiguous() for end, tensor in made.items()}
        if hessian_KK is not None:
            errors[name] = proxy_error(weights[name], decoded_NK, hessian_KK)
        _put(module, name, decoded_NK)
    if errors:
        worst = max(errors, key=lambda name: errors[name])
        log.info("layer %d: loses %.4f of its outputs' squares at most (%s)", index, errors[worst], worst)
    if codes.needs_inputs:
        runner.advance(index)
        _write(paths.join(folder, HIDDEN.format(index + 1)), {"hidden": runner.hidden_RTH})
    paths.write_text_atomic(paths.join(folder, ERRORS.format(index)), strict_json.dumps(errors) + "\n")
    _write(paths.join(folder, layer_file(index)), parts)
    for stale in (HIDDEN.format(index), HIDDEN.format(index - 1)):
        if paths.exists(paths.join(folder, stale)):
            paths.remove_tree(paths.join(folder, stale))
    for name, tensor in weights.items():
        _put(module, name, tensor.to("meta"))


class _AllRecorded(Exception):
    """Ends a forward pass whose layers were only asked for their inputs."""


class _Runner:
    """The model's layers, run one at a time over all calibration rows."""

    def __init__(
        self, module: nn.Module, path: str, layers: nn.ModuleList, *, rows: Sequence[Mapping[str, Tensor]]
    ) -> None:
        self.module, self.rows, self.layers = module, rows, layers
        self.hidden_RTH = torch.empty(0)
        self._recorded: list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = []
        calls = [LayerCall(self, index) for index in range(len(layers))]
        parent, _, leaf = path.rpartition(".")
        self._owner, self._leaf, self._calls = module.get_submodule(parent), leaf, _Calls(calls, layers)

    def layer(self, index: int) -> nn.Module:
        """Return layer `index`."""
        return self.layers[index]

    def run(self, index: int, hidden: Tensor, rest: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Record what a layer is given, in the model's own loop."""
        self._recorded.append((hidden, rest, keywords))
        if index == len(self.layers) - 1:
            raise _AllRecorded
        return hidden

    @torch.no_grad()
    def hessians(self, index: int, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the mean of x x^T (K, K), float32, of the inputs of modules of a layer; equal inputs share one."""
        sums: dict[str, Tensor] = {}
        shared: dict[str, str] = {}
        seen: dict[int, tuple[str, Tensor]] = {}  # with the tensors, whose ids would else go to others
        counted = [0]

        def hook_of(name: str) -> Callable[..., None]:
            def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                first = seen.setdefault(id(inputs[0]), (name, inputs[0]))[0]
                shared[name] = first
                if first != name:
                    return
                x_TK = inputs[0].reshape(-1, inputs[0].shape[-1])[self._is_token.flatten()].to(torch.float32)
                if name not in sums:
                    sums[name] = torch.zeros(x_TK.shape[1], x_TK.shape[1])
                sums[name].addmm_(x_TK.t(), x_TK)

            return note

        hooks = [self.module.get_submodule(name).register_forward_pre_hook(hook_of(name)) for name in names]
        try:
            for number in range(len(self.rows)):
                seen.clear()
                self._run_row(index, number)
                counted[0] += int(self._is_token.sum())
        finally:
            for hook in hooks:
                hook.remove()
        for total in sums.values():
            total /= max(1, counted[0])
        return {name: sums[first] for name, first in shared.items()}

    @torch.no_grad()
    def advance(self, index: int) -> None:
        """Replace the hidden states by what a layer makes of them."""
        outputs = [self._run_row(index, number) for number in range(len(self.rows))]
        self.hidden_RTH = torch.cat(outputs)

    def _run_row(self, index: int, number: int) -> Tensor:
        row = self.rows[number]
        self._is_token = row["segments"] > 0
        first, calls = self._inputs(row)
        hidden = first if index == 0 else self.hidden_RTH[number : number + 1]
        rest, keywords = calls[index]
        output = self.layers[index](hidden, *rest, **keywords)
        return output[0] if isinstance(output, tuple) else output

    def _inputs(self, row: Mapping[str, Tensor]) -> tuple[Tensor, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
        """Return the embedded row, and for every layer what it is given besides."""
        self._recorded = []
        with self._recording(), torch.no_grad(), suppress(_AllRecorded):
            self.module(**model_inputs(self.module, row))
        return self._recorded[0][0], [(rest, keywords) for _, rest, keywords in self._recorded]

    @contextmanager
    def _recording(self) -> Iterator[None]:
        setattr(self._owner, self._leaf, self._calls)
        try:
            yield
        finally:
            setattr(self._owner, self._leaf, self.layers)


class _Calls(nn.Module):
    """A list of calls in the place of a model's layers, whose parameters it holds."""

    def __init__(self, calls: Sequence[LayerCall], layers: nn.ModuleList) -> None:
        super().__init__()
        self.calls, self.layers = calls, layers

    def __iter__(self) -> Iterator[LayerCall]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __getitem__(self, index: Any) -> Any:
        return self.calls[index]


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    module.get_submodule(owner)._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


def _write(place: str, tensors: Mapping[str, Tensor]) -> None:
    paths.write_chunks_atomic(place, chunks_of(tensors))


def _read(place: str) -> dict[str, Tensor]:
    return tensors_in(bytearray(paths.read_bytes(place)))
