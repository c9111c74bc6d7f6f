"""A copy of a model in training that text is written with: layers apart, adapters in their weights, whole on each chip.

A run keeps its weights as steps want them: stacks of folded layers, parts of them on each device, trained ones in
float32. Read so for every token, they would be sliced, gathered and cast for every token. The copy is made by one
program, in the model's data type, as often as the parameters have changed."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.models.adapters.linear import LoraLinear
from tpu_experiments.models.adapters.token_rows import in_place_of_rows, indices_of, without_token_rows
from tpu_experiments.models.sources.build import BuiltModel, describe, placed_buffers
from tpu_experiments.optim.ema import held_of
from tpu_experiments.runtime.base import Batch, Program, Runtime
from tpu_experiments.runtime.ops import in_use
from tpu_experiments.runtime.stacked import TOKEN_ROWS, is_learnt_scale, is_magnitude, unstacked


class MergedCopy:
    """The module of the copy, for a `Decoder`, and the program that fills it.

    Adapters of weights that are held as codes, rounded or transposed, of the embedding, and those with lengths (DoRA),
    stay beside them.

    Args:
        model: in training.
        averages: of its trainable parameters, or another view of them, which the copy can be filled with too; None:
            there is none.
    """

    def __init__(
        self,
        model: BuiltModel,
        *,
        lora: LoraConfig,
        runtime: Runtime,
        averages: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.model, self.runtime = model, runtime
        self.module, _ = describe(model.source, lora=lora)
        self.module.requires_grad_(False)
        without_token_rows(self.module)
        self.scales = merged_linears(self.module)
        placed_buffers(self.module, place=runtime.place)
        self.places: dict[str, list[str]] = {name: [] for name, _ in self.module.named_parameters()}
        first = {id(p): name for name, p in self.module.named_parameters()}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):  # a tied weight has several
            self.places[first[id(parameter)]].append(name)
        self.shapes = {name: tuple(p.shape) for name, p in self.module.named_parameters()}
        self.tensors: dict[str, Tensor] = {}
        """The copy's weights by name; empty before the first `refresh` and after `release`."""
        self.program = self._program(model.trainable, name="merge")
        self.program_of_averages = None if averages is None else self._program(averages, name="merge averages")

    def _program(self, parameters: Mapping[str, Tensor], *, name: str) -> Program[dict[str, Tensor]]:
        merged = partial(self.merged, parameters=parameters)
        return self.runtime.program(merged, name=name, held=lambda: held_of(parameters))

    def refresh(self, *, is_average: bool = False) -> None:
        """Fill the copy with the current parameters, or their averages; the one before is freed first."""
        self.release()
        program = self.program_of_averages if is_average else self.program
        assert program is not None, "there are averages"
        with torch.no_grad():
            self._hold(program({}))

    def release(self) -> None:
        """Free the copy: the module has no weights until it is filled again."""
        self._hold({name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()})
        self.tensors = {}

    def _hold(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        for name, tensor in tensors.items():
            held = nn.Parameter(tensor, requires_grad=False)
            for place in self.places[name]:
                path, _, leaf = place.rpartition(".")
                self.module.get_submodule(path)._parameters[leaf] = held

    def merged(self, batch: Batch, *, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the copy's weights by name; the program, which reads parameters and no batch."""
        frozen = {name: p for name, p in self.model.module.named_parameters() if not p.is_meta}
        trained = unstacked(dict(parameters))
        own = unstacked(frozen) | trained
        values = {name: self._value(name, own, is_trained=name in trained) for name in self.shapes}
        for name in trained.keys() & values.keys():
            if values[name].dtype == trained[name].dtype:
                values[name] = values[name] * 1  # a tensor of its own: a step writes over the parameter's
        return {name: self._whole(name, value) for name, value in values.items()}

    def _value(self, name: str, own: Mapping[str, Tensor], *, is_trained: bool) -> Tensor:
        """Return a weight with its adapter in it, rounded once, and without the columns of a padded one."""
        path, _, _ = name.rpartition(".")
        weight, shape = own[name], self.shapes[name]
        if weight.shape != shape:  # a view of a view would keep the one between alive: such a call is not replayed
            weight = weight[tuple(map(slice, shape))]
        if not weight.is_floating_point() or is_magnitude(name) or is_learnt_scale(name):
            return weight
        dtype, rows = self.model.source.dtype, own.get(f"{path}.{TOKEN_ROWS}")
        if rows is not None and name == f"{path}.weight":
            return in_place_of_rows(weight, rows, indices_of(self.model.module.get_submodule(path))).to(dtype)
        if name != f"{path}.weight" or path not in self.scales:
            return weight.to(dtype) if is_trained else weight
        a, b = (own[f"{path}.{part}"].float() for part in ("lora_A", "lora_B"))
        return (weight.float() + self.scales[path] * b @ a).to(dtype)

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        folding = self.runtime.folding
        if folding is None:
            return tensor
        return self.runtime.constrain(tensor, axes=in_use(folding.axes(name, tuple(tensor.shape))))


def merged_linears(module: nn.Module) -> dict[str, float]:
    """Replace adapters that are the plain formula by a Linear of their weight; returns their scales by path."""
    found: dict[str, float] = {}
    for path, part in list(module.named_modules()):
        if isinstance(part, LoraLinear) and part.is_formula:
            linear: Any = nn.Linear(part.in_features, part.out_features, bias=False, device="meta")
            linear.weight, linear.bias = part.weight, part.bias
            module.set_submodule(path, linear)
            found[path] = part.scale
    return found
