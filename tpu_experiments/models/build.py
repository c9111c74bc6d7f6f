"""From a model source to a module on the device, tensor by tensor, with its adapters."""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.sources import LoraConfig
from tpu_experiments.models.fold import fold
from tpu_experiments.models.huggingface import HuggingFaceModel, Named
from tpu_experiments.models.lora import ParameterReport, adapted_weights, inject
from tpu_experiments.models.stacking import stacked_weights
from tpu_experiments.models.trained import fingerprints
from tpu_experiments.runtime.layout import Folding

TRIM_BYTES = 16 * 2**20
Place = Callable[..., Tensor]  # (tensor, *, name) -> the tensor where it lives


@dataclass
class BuiltModel:
    """A module whose frozen tensors are on the device, and its trainable parameters beside it.

    The module keeps its trainable parameters on the meta device: every forward pass gets them from `trainable`, so
    that there is one copy of each, in float32.
    """

    module: nn.Module
    trainable: dict[str, Tensor]
    report: ParameterReport
    source: HuggingFaceModel
    initial: dict[str, Tensor]
    """Host copies of PiSSA's initial A and B, which the export must subtract; empty otherwise."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Of the trainable parameters at their start, under Hugging Face's names (models/trained.py)."""
    order: tuple[str, ...] = ()
    """Names of the trainable parameters as they came onto the device. torch_xla orders a program's results by it, so
    tensors that are put in their place later come in the same order, or the step is another program."""


def describe(source: HuggingFaceModel, *, lora: LoraConfig) -> tuple[nn.Module, ParameterReport]:
    """The module on the meta device with its adapters: names, shapes and counts, no memory.

    Raises:
        ConfigError: the values of the model's config do not go together, or an adapter cannot be where it is asked for.
    """
    module = source.empty()
    report = inject(module, lora)
    named = {name for name, _ in module.named_parameters()}
    shared = [name.removesuffix(".weight") for name in adapted_weights(module) if name not in named]
    if shared:
        raise ConfigError(
            f"lora.targets=[{', '.join(lora.targets)}] matches {shared[0]}, whose weight is the embedding's "
            "(tie_word_embeddings); an adapter there would change both; leave it out."
        )
    return module, report


def shapes_of_base(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter that comes from the model's source: all but the adapters."""
    named = module.named_parameters()
    return {name: tuple(p.shape) for name, p in named if not name.endswith((".lora_A", ".lora_B"))}


def build_model(
    source: HuggingFaceModel,
    *,
    lora: LoraConfig,
    seed: int,
    place: Place,
    folding: Folding | None = None,
) -> BuiltModel:
    """Load `source` onto the device.

    Args:
        place: puts one host tensor where the parameter of that name lives.
        folding: folds equal layers into one that runs in a loop; None leaves the layers as they are.
    """
    module, report = describe(source, lora=lora)
    adapted = adapted_weights(module)
    source.require_weights(shapes_of_base(module))
    if folding is not None and source.model.stack == "scanned":
        chosen = source.model
        fold(module, folding, remat=chosen.remat, saved=chosen.saved, group=chosen.stack_group)
    initial: dict[str, Tensor] = {}
    weights = stacked_weights(source, shapes_of_base(module), adapted=adapted, lora=lora, seed=seed, initial=initial)
    marks: dict[str, str] = {}
    trainable = placed_weights(module, weights, place=place, marks=marks)
    placed_buffers(module, place=place)
    names = [name for name, p in module.named_parameters() if p.requires_grad]  # weights may come in any order
    in_order = {name: trainable[name] for name in names}
    return BuiltModel(module, in_order, report, source, initial, marks, tuple(trainable))


def placed_buffers(module: nn.Module, *, place: Place) -> None:
    """Put what no checkpoint has (RoPE frequencies) onto the device, once all weights are there."""
    module.tie_weights()  # type: ignore[operator]  # placing replaced the shared embedding
    for name, buffer in list(module.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._buffers[leaf] = place(buffer, name=name)


def placed_weights(
    module: nn.Module, weights: Iterator[Named], *, place: Place, marks: dict[str, str]
) -> dict[str, Tensor]:
    """Put frozen weights into the module; returns the trainable ones, in float32, and leaves their marks in `marks`."""
    trainable: dict[str, Tensor] = {}
    passed_bytes = 0
    for item in weights:
        if module.get_parameter(item.name).requires_grad:
            marks |= {} if item.tensor.is_meta else fingerprints(item.name, item.tensor)  # a plan has no values
            trainable[item.name] = place(item.tensor.to(torch.float32), name=item.name)
        else:
            owner, _, leaf = item.name.rpartition(".")
            frozen = nn.Parameter(place(item.tensor, name=item.name), requires_grad=False)
            module.get_submodule(owner)._parameters[leaf] = frozen
        passed_bytes += item.tensor.nbytes
        del item  # else it lives on while the next tensor is read
        if passed_bytes >= TRIM_BYTES:
            passed_bytes = 0
            return_freed_memory()
    return trainable


def return_freed_memory() -> None:
    """Have glibc give freed blocks back to the system.

    The host copies of tensors below 32 MiB come from its heap and the device's buffers lie between them, so that
    without this a model of small tensors held up to three times its weights after loading (measured on torch_xla's
    CPU device, 316 MiB of 4 MiB tensors: 947 MiB). It costs 0.2 s per 640 MiB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
