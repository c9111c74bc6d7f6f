"""A model for inference: every tensor on the device in the model's data type, adapters not merged."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.model_schema import LoraConfig, is_target, lora_of
from tpu_experiments.models.adapters.dora import DoraLinear
from tpu_experiments.models.adapters.embeddings import adapted_embedding
from tpu_experiments.models.adapters.experts import ParameterLora, adapted_parameters
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
from tpu_experiments.models.adapters.token_rows import token_rows, without_token_rows
from tpu_experiments.models.huggingface import HuggingFaceModel
from tpu_experiments.models.parts.named import Named
from tpu_experiments.models.sources.build import describe, held_as, placed_buffers, placed_weights, shapes_of_base
from tpu_experiments.runtime.ops import PlaceTensor
from tpu_experiments.runtime.stacked import (
    TOKEN_ROWS,
    is_adapter_part,
    is_magnitude,
    is_of_rows,
    is_side_tensor,
    weight_of,
)
from tpu_experiments.storage.tensors import require_finite

Held = tuple[Tensor, Tensor]
"""Codes of a rounded weight and their scales."""


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

    Adapters of rounded weights (`model.linear=lr_qat`) are folded into their integers, and trained rows are in their
    matrices.

    Raises:
        ConfigError: the tensors are not of this model, are an incomplete set of a whole one, or have values that are
            NaN or infinite.
    """
    model = TrainedModel(source, lora, trained, reduced_with_seed, origin)
    own = [name for name in shapes_of_base(model.module) if name not in trained]
    model.require_whole(own)
    without_token_rows(model.module)
    for part in model.module.modules():
        if isinstance(part, DoraLinear):
            part.divide()
        if isinstance(part, RoundedLinear):
            part.fold()
    placed_weights(model.module, _frozen_weights(model, own, rounded_to=rounded_to), place=place, marks={})
    placed_buffers(model.module, place=place)
    return model.module


class TrainedModel:
    """A source's weights, and trained tensors beside them or in their place, all on the host."""

    def __init__(
        self,
        source: HuggingFaceModel,
        lora: LoraConfig,
        trained: Mapping[str, Tensor],
        reduced_with_seed: int | None,
        origin: str,
    ) -> None:
        """Describe the model; arguments are those of `build_frozen`.

        Raises:
            ConfigError: the tensors are not of this model.
        """
        self.source, self.lora, self.trained = source, lora, trained
        self.reduced_with_seed, self.origin = reduced_with_seed, origin
        self.module, self.shapes = describe_trained(source, lora=lora, trained=trained, origin=origin)
        self.linears, self.quantised = adapted_weights(self.module), set(quantised_shapes(self.module))
        self.adapted = self.linears | adapted_parameters(self.module)
        self.format, self.grid = format_of(source.model), grid_of(source.model)
        self.rows = token_rows(self.module)
        """Tokens of trained rows, by the name of their matrix."""
        self.embedding, self.is_shared = adapted_embedding(self.module)
        """Name of the embedding's matrix, if it has an adapter, and whether the head shares that."""

    def require_whole(self, own: Sequence[str]) -> None:
        """Require the trained tensors and these weights of the source, `own`, to be the whole model.

        Raises:
            ConfigError: it is a model without adapters, and some are missing; or the source has other weights.
        """
        if self.trained and not self.lora.r and own:
            raise ConfigError(
                f"{self.origin}; it lacks {len(own)} of the {len(own) + len(self.trained)} tensors of a whole model, "
                f"first {own[0]}; its files are not all there: copy it again."
            )
        self.source.require_weights({name: self.shapes[name] for name in own})

    def finite(self, name: str, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a trained tensor in a data type.

        Raises:
            ConfigError: it holds NaN or infinite values.
        """
        tensor = self.trained[name].to(dtype)
        require_finite(tensor, name=name, place=self.origin)
        return tensor

    def reduced(self, base: Named) -> Named:
        """Return a weight of the source as training began with it; `lora.init=pissa` takes its adapter from it."""
        if self.reduced_with_seed is None or base.name not in self.adapted:
            return base
        is_transposed = self.adapted[base.name]
        return next(adapter_weights(base, lora=self.lora, seed=self.reduced_with_seed, is_transposed=is_transposed))

    def with_rows(self, base: Named) -> Named:
        """Return a weight with its trained rows in the place of its own; one without any unchanged.

        Raises:
            ConfigError: they hold NaN or infinite values.
        """
        if base.name not in self.rows:
            return base
        rows = self.finite(base.name.removesuffix("weight") + TOKEN_ROWS, dtype=base.tensor.dtype)
        return Named(base.name, base.tensor.index_copy(0, torch.tensor(self.rows[base.name]), rows))

    def on_grid(self, base: Named, *, dtype: torch.dtype) -> tuple[Held, Held] | None:
        """Return codes and scales of a rounded weight, as trained and as at first; None of one that is not rounded.

        Raises:
            ConfigError: its adapter holds NaN or infinite values.
        """
        if self.grid is None or base.name not in self.adapted:
            return None
        for part in (A, B, LEARNT_SCALE):
            self.finite(base.name.removesuffix("weight") + part)
        return folded_weight(base, self.trained, lora=self.lora, grid=self.grid, dtype=dtype)


def _frozen_weights(model: TrainedModel, own: list[str], *, rounded_to: torch.dtype | None) -> Iterator[Named]:
    """Yield the weights as the frozen module holds them, one in memory at a time."""
    source = model.source
    for base in source.weights(own):
        if rounded_to is not None:
            base = Named(base.name, base.tensor.to(rounded_to).to(source.dtype))
        base = model.with_rows(model.reduced(base))
        yield from _frozen_parts(model, base, dtype=rounded_to or source.dtype)
        del base  # as below
    for name in model.trained:
        if is_magnitude(name) or is_of_rows(name) or (model.grid is not None and is_adapter_part(name)):
            continue
        item = model.with_rows(Named(name, model.finite(name, dtype=source.dtype)))
        yield from _frozen_parts(model, item, dtype=rounded_to or source.dtype)
        del item  # otherwise it stays allocated while the next one is read


def _frozen_parts(model: TrainedModel, base: Named, *, dtype: torch.dtype) -> Iterator[Named]:
    """Yield what the frozen module holds of a weight, and with DoRA its divided lengths."""
    if (found := model.on_grid(base, dtype=dtype)) is not None:
        (codes, scales), _ = found
        yield Named(base.name, codes)
        yield Named(base.name.removesuffix("weight") + LEARNT_SCALE, scales)
        return
    parts = list(held_as(base, model.source.model, quantised=model.quantised))
    if model.lora.dora and base.name in model.adapted:
        yield _divided_lengths(model, base.name, {part.name: part.tensor for part in parts})
    yield from parts


def _divided_lengths(model: TrainedModel, name: str, parts: Mapping[str, Tensor]) -> Named:
    """Divide an adapted weight's trained lengths by the norms of its rows, which do not change any more."""
    prefix, trained = name.removesuffix("weight"), model.trained
    magnitude = model.finite(prefix + MAGNITUDE)
    if model.format is None or name not in model.quantised:
        weight = parts[name].t() if model.adapted[name] else parts[name]
    else:
        own = {part.removeprefix(prefix): tensor for part, tensor in parts.items()}
        weight = model.format.decode(own, dtype=model.source.dtype)
    scale = scale_of(lora_of(model.lora, prefix.removesuffix(".")))
    norms = lengths_of_rows(weight, trained[prefix + A], trained[prefix + B], scale=scale)
    return Named(prefix + MAGNITUDE, magnitude / norms)


def without_effect(module: nn.Module, *, place: PlaceTensor) -> nn.Module:
    """Return a copy of a model whose adapters change nothing: B is zero, and DoRA's lengths are the rows' own.

    It shares every other tensor with the model, and its programs are the same. Not for rounded weights, which are
    folded.
    """
    tensors: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    copied = copy.deepcopy(module, tensors)
    for name, part in copied.named_modules():
        if not isinstance(part, LoraLinear | ParameterLora):
            continue
        for leaf, value in ((B, 0.0), (MAGNITUDE, 1.0)):
            own = getattr(part, leaf, None)
            if own is not None:
                tensor = place(torch.full(own.shape, value, dtype=own.dtype), name=f"{name}.{leaf}")
                setattr(part, leaf, nn.Parameter(tensor, requires_grad=False))
    return copied


def describe_trained(
    source: HuggingFaceModel, *, lora: LoraConfig, trained: Mapping[str, Tensor], origin: str
) -> tuple[nn.Module, dict[str, tuple[int, ...]]]:
    """Build the module on the meta device and return it with the shapes of its parameters.

    Raises:
        ConfigError: a tensor of `trained` has no counterpart in the module, or another shape.
    """
    empty = source.empty()
    bases = {name.rpartition(".")[0] for name, _ in empty.named_parameters()}
    weights = {name: weight_of(name.rpartition(".")[0]) if is_adapter_part(name) else name for name in trained}
    strays = [name for name, weight in weights.items() if weight.rpartition(".")[0] not in bases]
    if strays:
        raise _not_of_this_model(strays[0], found=trained[strays[0]].shape, expected=None, model=source, origin=origin)
    modules = [name for name, _ in empty.named_modules()]
    # PEFT takes a target that no module has.
    lora = replace(lora, targets=[each for each in lora.targets if any(is_target(name, each) for name in modules)])
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
    is_vocabulary = name.endswith((".embed_tokens.weight", "lm_head.weight"))
    if is_vocabulary and found and expected and found[0] > expected[0] and found[1:] == expected[1:]:
        return ConfigError(
            f"{origin}; it has {found[0]} rows of {name} and model.path={model.model.path} has {expected[0]}: its base "
            f"was resized; set model.vocab_size={found[0]}."
        )
    module = name.rpartition(".")[0]
    weight = weight_of(module) if is_adapter_part(name) else name
    first = next((first for first, others in model.tied_names.items() if weight in others), None)
    if first is not None and expected is None:
        return ConfigError(
            f"{origin}; it has {name}, and in its base {weight} is {first} (tie_word_embeddings): PEFT trained the two "
            "apart, as ensure_weight_tying is false; merge it into its base with PEFT's merge_and_unload, save that, "
            "and give its folder as model.path."
        )
    if found is None and is_adapter_part(name):
        return ConfigError(
            f"{origin}; it targets {module} and has no {name}; copy it again, or name the base that it was trained on: "
            "task.base=FOLDER or model.path=FOLDER."
        )
    has, wants = ("nothing" if shape is None else str(tuple(shape)) for shape in (found, expected))
    return ConfigError(
        f"{origin}; it has {name} as {has} and model.path={model.model.path} has it as {wants}; it was trained on "
        "another model: set task.base=FOLDER or model.path=FOLDER to that one."
    )
