"""A model for inference: every tensor on the device in the model's data type, adapters not merged."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig
from tpu_experiments.models.adapters.dora import DoraLinear
from tpu_experiments.models.adapters.linear import LoraLinear
from tpu_experiments.models.adapters.lora import (
    LEARNT_SCALE,
    MAGNITUDE,
    A,
    B,
    adapted_weights,
    adapter_weights,
    folded_weight,
    lengths_of_rows,
    scale_of,
)
from tpu_experiments.models.adapters.low_rank_qat import RoundedLinear, grid_of
from tpu_experiments.models.adapters.quantised import format_of, quantised_shapes
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.parts.named import Named
from tpu_experiments.models.sources.build import describe, held_as, placed_buffers, placed_weights, shapes_of_base
from tpu_experiments.runtime.ops import PlaceTensor
from tpu_experiments.runtime.stacked import is_adapter_part, is_magnitude, is_side_tensor
from tpu_experiments.storage.tensors import require_finite


def build_frozen(
    source: HuggingFaceModel,
    *,
    lora: LoraConfig,
    trained: Mapping[str, Tensor],
    place: PlaceTensor,
    reduced_with_seed: int | None = None,
    origin: str = "",
    rounded_to: torch.dtype | None = None,
) -> nn.Module:
    """Load `source` onto the device with trained tensors beside its weights or in their place.

    Args:
        lora: config of the adapters in `trained`; rank 0 where it has none.
        trained: host tensors under Hugging Face's names: those of every adapter, or weights of the model, or nothing.
        reduced_with_seed: seed of a run with `lora.init=pissa`, whose checkpoints hold A and B for the reduced base.
        origin: source of `trained`, for error messages.
        rounded_to: data type in which the base was trained over, if the source's holds more digits.

    Adapters of rounded weights (`model.linear=lr_qat`) are folded into their integers.

    Raises:
        ConfigError: the tensors are not of this model, are an incomplete set of a whole one, or have values that are
            NaN or infinite.
    """
    module, shapes = describe_trained(source, lora=lora, trained=trained, origin=origin)
    own = [name for name in shapes_of_base(module) if name not in trained]
    require_whole(own, trained=trained, lora=lora, origin=origin)
    source.require_weights({name: shapes[name] for name in own})
    adapted = adapted_weights(module)

    quantised = set(quantised_shapes(module))
    grid = grid_of(source.model)

    def divided_lengths(name: str, parts: Mapping[str, Tensor]) -> Named:
        """Divide an adapted weight's trained lengths by the norms of its rows, which do not change any more."""
        prefix = name.removesuffix("weight")
        magnitude = trained[prefix + MAGNITUDE].to(torch.float32)
        require_finite(magnitude, name=prefix + MAGNITUDE, place=origin)
        format = format_of(source.model) if name in quantised else None
        if format is None:
            weight = parts[name].t() if adapted[name] else parts[name]
        else:
            own = {part.removeprefix(prefix): tensor for part, tensor in parts.items()}
            weight = format.decode(own, dtype=source.dtype)
        norms = lengths_of_rows(weight, trained[prefix + A], trained[prefix + B], scale=scale_of(lora))
        return Named(prefix + MAGNITUDE, magnitude / norms)

    def weights() -> Iterator[Named]:
        for base in source.weights(own):
            if rounded_to is not None:
                base = Named(base.name, base.tensor.to(rounded_to).to(source.dtype))
            if reduced_with_seed is not None and base.name in adapted:
                is_transposed = adapted[base.name]
                base = next(adapter_weights(base, lora=lora, seed=reduced_with_seed, is_transposed=is_transposed))
            if grid is not None and base.name in adapted:
                require_finite_parts(base.name, trained, place=origin)
                dtype = rounded_to or source.dtype
                (codes, scales), _ = folded_weight(base, trained, lora=lora, grid=grid, dtype=dtype)
                yield Named(base.name, codes)
                yield Named(base.name.removesuffix("weight") + LEARNT_SCALE, scales)
                continue
            parts = list(held_as(base, source.model, quantised=quantised))
            if lora.dora and base.name in adapted:
                yield divided_lengths(base.name, {part.name: part.tensor for part in parts})
            yield from parts
            del base, parts  # as below
        for name in trained:
            if is_magnitude(name) or (grid is not None and is_adapter_part(name)):
                continue
            tensor = trained[name].to(source.dtype)
            require_finite(tensor, name=name, place=origin)
            yield from held_as(Named(name, tensor), source.model, quantised=quantised)
            del tensor  # otherwise it stays allocated while the next one is read

    for part in module.modules():
        if isinstance(part, DoraLinear):
            part.divide()
        if isinstance(part, RoundedLinear):
            part.fold()
    placed_weights(module, weights(), place=place, marks={})
    placed_buffers(module, place=place)
    return module


def require_finite_parts(base: str, trained: Mapping[str, Tensor], *, place: str) -> None:
    """Require the adapter of a rounded weight to have no NaN or infinite values.

    Raises:
        ConfigError: it has.
    """
    for part in (A, B, LEARNT_SCALE):
        name = base.removesuffix("weight") + part
        require_finite(trained[name], name=name, place=place)


def without_effect(module: nn.Module, *, place: PlaceTensor) -> nn.Module:
    """Return a copy of a model whose adapters change nothing: B is zero, and DoRA's lengths are the rows' own.

    It shares every other tensor with the model, and its programs are the same. Not for rounded weights, which are
    folded.
    """
    tensors: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    copied = copy.deepcopy(module, tensors)
    for name, part in copied.named_modules():
        if not isinstance(part, LoraLinear):
            continue
        for leaf, value in ((B, 0.0), (MAGNITUDE, 1.0)):
            own = getattr(part, leaf, None)
            if own is not None:
                tensor = place(torch.full(own.shape, value, dtype=own.dtype), name=f"{name}.{leaf}")
                setattr(part, leaf, nn.Parameter(tensor, requires_grad=False))
    return copied


def require_whole(own: Sequence[str], *, trained: Mapping[str, Tensor], lora: LoraConfig, origin: str) -> None:
    """Require the tensors of a fully trained model to be all of its tensors.

    Args:
        own: names of the parameters that `trained` lacks.

    Raises:
        ConfigError: it is a model without adapters, and some are missing.
    """
    if trained and not lora.r and own:
        raise ConfigError(
            f"{origin}; it lacks {len(own)} of the {len(own) + len(trained)} tensors of a whole model, first {own[0]}; "
            "its files are not all there: copy it again."
        )


def describe_trained(
    source: HuggingFaceModel, *, lora: LoraConfig, trained: Mapping[str, Tensor], origin: str
) -> tuple[nn.Module, dict[str, tuple[int, ...]]]:
    """Build the module on the meta device and return it with the shapes of its parameters.

    Raises:
        ConfigError: a tensor of `trained` has no counterpart in the module, or another shape.
    """
    bases = {name.rpartition(".")[0] for name, _ in source.empty().named_parameters()}
    strays = [name for name in trained if name.rpartition(".")[0] not in bases]
    if strays:
        raise _not_of_this_model(strays[0], found=trained[strays[0]].shape, expected=None, model=source, origin=origin)
    module, _ = describe(source, lora=lora)
    module.requires_grad_(False)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters() if not is_side_tensor(name)}
    shapes |= shapes_of_base(module)
    for name in {**dict.fromkeys(n for n in shapes if is_adapter_part(n)), **dict.fromkeys(trained)}:
        found = trained[name].shape if name in trained else None
        if found is None or tuple(found) != shapes.get(name):
            raise _not_of_this_model(name, found=found, expected=shapes.get(name), model=source, origin=origin)
    return module, shapes


def _not_of_this_model(
    name: str, *, found: Sequence[int] | None, expected: Sequence[int] | None, model: HuggingFaceModel, origin: str
) -> ConfigError:
    has, wants = ("nothing" if shape is None else str(tuple(shape)) for shape in (found, expected))
    return ConfigError(
        f"{origin}; it has {name} as {has} and model.path={model.model.path} has it as {wants}; it was trained on "
        "another model: set task.base=FOLDER or model.path=FOLDER to that one."
    )
