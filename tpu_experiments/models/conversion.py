"""Tensors of a checkpoint under the names and in the shapes of the model's class, one at a time.

transformers saves some models in an older form than its classes have: each expert of Mixtral as a separate tensor,
GPT-NeoX's head under another name. The conversions are transformers' own.
"""

from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from tpu_experiments.models.stored import StoredTensor


@dataclass(frozen=True)
class Part:
    """A stored tensor that is an input of a converter."""

    key: str
    """Its name in the checkpoint."""
    pattern: str
    """The converter's source pattern that the name matched."""
    stored: StoredTensor


@dataclass(frozen=True)
class ConvertedTensor:
    """A tensor of the model that is computed from stored ones when it is read."""

    name: str
    shape: tuple[int, ...]
    target: str
    """transformers' name for everything that is made from these parts together."""
    parts: tuple[Part, ...]
    converter: WeightConverter
    module: PreTrainedModel

    @property
    def file(self) -> Path:
        """The file of its first part."""
        return self.parts[0].stored.file

    def read(self) -> Tensor:
        """Read and convert the parts; returns a host tensor in the data type of the file.

        Raises:
            ConfigError: a part has a quantised data type.
        """
        tensors = {part.key: part.stored.read() for part in self.parts}
        return converted(self.target, self.parts, tensors, converter=self.converter, module=self.module)[self.name]


def converted(
    target: str,
    parts: tuple[Part, ...],
    tensors: dict[str, Tensor],
    *,
    converter: WeightConverter,
    module: PreTrainedModel,
) -> dict[str, Tensor]:
    """Convert stored tensors to the model's; `tensors` is emptied on the way."""
    own = deepcopy(converter)  # a converter accumulates its inputs
    for part in parts:
        own.add_tensor(target, part.key, part.pattern, tensors.pop(part.key))
    made = own.convert(target, model=module, config=module.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def converted_tensors(
    stored: Mapping[str, StoredTensor], module: PreTrainedModel
) -> dict[str, StoredTensor | ConvertedTensor]:
    """Return name, shape and source of every tensor of a checkpoint, named as in `module`.

    Args:
        module: an instance of the checkpoint's class on the meta device.
    """
    transforms = get_model_conversion_mapping(module)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    own = module.state_dict()
    found: dict[str, StoredTensor | ConvertedTensor] = {}
    parts: dict[str, list[Part]] = defaultdict(list)
    for key in sorted(stored, key=dot_natural_key):  # experts are stacked in this order
        name, pattern = rename_source_key(key, renamings, converters, module.base_model_prefix, own)
        if pattern is None:
            found[name] = stored[key]
        else:
            parts[name].append(Part(key, pattern, stored[key]))
    for target, some in parts.items():
        converter = by_pattern[some[0].pattern]
        empty = {part.key: torch.empty(part.stored.shape, device="meta") for part in some}
        for name, tensor in converted(target, tuple(some), empty, converter=converter, module=module).items():
            found[name] = ConvertedTensor(name, tuple(tensor.shape), target, tuple(some), converter, module)
    return found
