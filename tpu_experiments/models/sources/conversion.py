"""The tensors of a checkpoint under the names and in the shapes that the model's class has, one at a time.

transformers saves some models in an older form than its classes have: each expert of Mixtral as a tensor of its own,
GPT-NeoX's head under another name. The conversions are transformers' own. Tensors are read, not mapped: a mapped
tensor that is copied to a device is resident twice. Layout of a file (github.com/huggingface/safetensors, "Format"):
length of the header (u64, little endian), JSON header, data."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from tpu_experiments.config.errors import ConfigError, one_line
from tpu_experiments.config.regular_files import NotRegular, open_regular, read_regular, require_regular
from tpu_experiments.quantisation.parts import SHAPE, PartsLayout
from tpu_experiments.storage.tensors import DTYPES as STORED

WEIGHTS_INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
DTYPES = {name: dtype for name, dtype in STORED.items() if dtype.is_floating_point}
CODES = {name: dtype for name, dtype in STORED.items() if not dtype.is_floating_point}
"""Data types of buffers, and of what stands for quantised weights (quantisation/parts.py)."""


@dataclass(frozen=True)
class StoredTensor:
    """Location of one tensor in a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset in bytes from the beginning of the file."""

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8

    def read(self) -> Tensor:
        """Read the tensor into memory of its own, in the data type of the file.

        Raises:
            ConfigError: the data type is a quantised one, which cannot be used without its scales.
        """
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"model.path={self.file.parent}; {self.file.name} holds weights as {self.dtype}, a quantised format; "
                f"use a checkpoint in one of {', '.join(DTYPES)}."
            )
        return self.read_as_stored()

    def read_as_stored(self) -> Tensor:
        """Read the tensor, which may be one of codes, in the data type of the file."""
        dtype = (DTYPES | CODES)[self.dtype]
        content = torch.empty(math.prod(self.shape) * dtype.itemsize, dtype=torch.uint8)
        with open_regular(self.file) as file:
            file.seek(self.start)
            count = file.readinto(memoryview(content.numpy()))  # type: ignore[arg-type]  # numpy 2.1 types it so
        assert count == content.numel(), "safe_open checked the length of the file"
        return content.view(dtype).view(self.shape)


@dataclass(frozen=True)
class PackedTensor:
    """A quantised weight, decoded when it is read."""

    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, StoredTensor]
    """The tensors that stand for it, by the end of their names."""
    layout: PartsLayout

    @property
    def file(self) -> Path:
        """The file of one of its parts."""
        return self.parts[SHAPE].file

    @property
    def nbytes(self) -> int:
        """Size in the files."""
        return sum(part.nbytes for part in self.parts.values())

    def read(self) -> Tensor:
        """Read the parts and return the weight that they decode to, float32."""
        return self.layout.decode({end: part.read_as_stored() for end, part in self.parts.items()})


AnyStored = StoredTensor | PackedTensor


def with_packed(stored: Mapping[str, StoredTensor], layout: PartsLayout) -> dict[str, AnyStored]:
    """Return the tensors of a checkpoint with every quantised weight as one, under the name of the weight.

    Raises:
        ConfigError: the tensors of a weight are not those of the layout.
    """
    found: dict[str, AnyStored] = {}
    weights = {name.removesuffix(SHAPE) for name in stored if name.endswith(f".weight{SHAPE}")}
    parts: dict[str, dict[str, StoredTensor]] = {name: {} for name in weights}
    for key, tensor in stored.items():
        name, dot, rest = key.rpartition(".weight_")
        weight = f"{name}.weight"
        if dot and weight in weights:
            parts[weight][f"_{rest}"] = tensor
        else:
            found[key] = tensor
    for weight, own in parts.items():
        found[weight] = PackedTensor(weight, _shape_of(weight, own, layout), own, layout)
    return found


def _shape_of(weight: str, parts: Mapping[str, StoredTensor], layout: PartsLayout) -> tuple[int, int]:
    """Return the shape of a weight after comparing its parts with the layout; of them, only the shape is read."""
    file = parts[SHAPE].file
    numbers = parts[SHAPE].read_as_stored().tolist() if parts[SHAPE].dtype == "I64" else []
    if len(numbers) == 2 and min(numbers) > 0:
        rows, columns = numbers
        wanted = {end: size for end, (size, _) in layout.sizes((rows, columns)).items()}
        known = all(part.dtype in DTYPES | CODES for part in parts.values())
        if known and {end: part.shape for end, part in parts.items()} == wanted:
            return rows, columns
    raise ConfigError(
        f"model.path={file.parent}; {file.name} has {weight} as {', '.join(sorted(parts))}, which are not in the sizes "
        "of quantization_config in its config.json; the two do not belong together."
    )


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a checkpoint folder by name.

    Raises:
        ConfigError: the folder has no safetensors, or its index and its files disagree.
    """
    if (folder / WEIGHTS).exists():  # transformers prefers it to an index too
        return _tensors_of(folder / WEIGHTS)
    if (folder / WEIGHTS_INDEX).exists():
        return _indexed(folder)
    raise ConfigError(
        f"model.path={folder}; no {WEIGHTS} and no {WEIGHTS_INDEX} there; save the model with save_pretrained."
    )


def _indexed(folder: Path) -> dict[str, StoredTensor]:
    try:
        file_of: dict[str, str] = json.loads(read_regular(folder / WEIGHTS_INDEX))["weight_map"]
        if not isinstance(file_of, dict) or not all(isinstance(f, str) and len(f) < 256 for f in file_of.values()):
            raise TypeError("weight_map is no object of file names")
    except NotRegular:
        raise
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        raise ConfigError(
            f"model.path={folder}; {WEIGHTS_INDEX} is not a readable index ({error!r}); download it again."
        ) from error
    files = sorted(set(file_of.values()))
    for file in files:
        if Path(file).name != file:
            raise ConfigError(f"model.path={folder}; {WEIGHTS_INDEX} names {file!r}, which is no file of that folder.")
        if not (folder / file).exists():
            raise ConfigError(f"model.path={folder}; {WEIGHTS_INDEX} names {file} which is not there; download it.")
    held = {file: _tensors_of(folder / file) for file in files}
    for name, file in file_of.items():
        if name not in held[file]:
            raise ConfigError(
                f"model.path={folder}; {WEIGHTS_INDEX} says that {file} holds {name!r} and it does not; the files "
                "are of different versions, download them together."
            )
    found: dict[str, StoredTensor] = {}
    for file, tensors in held.items():
        for name, tensor in tensors.items():  # also those that the index does not name, as transformers reads them
            if name in found:
                raise ConfigError(
                    f"model.path={folder}; {found[name].file.name} and {file} both hold {name!r}; the files are of "
                    "different versions, download them together into an empty folder."
                )
            found[name] = tensor
    return found


def _tensors_of(file: Path) -> dict[str, StoredTensor]:
    try:
        require_regular(file)
        with safe_open(file, framework="pt"):  # checks the header and the length, maps nothing yet
            pass
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"model.path={file.parent}; {file.name} is not a complete safetensors file ({error}); download it again."
        ) from error
    with open_regular(file) as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(file, facts["dtype"], tuple(facts["shape"]), 8 + length + facts["data_offsets"][0])
        for name, facts in header.items()
    }


@dataclass(frozen=True)
class Part:
    """A stored tensor that is an input of a converter."""

    key: str
    """Its name in the checkpoint."""
    pattern: str
    """The converter's source pattern that the name matched."""
    stored: AnyStored


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

    @property
    def nbytes(self) -> int:
        """Size in the files of everything that it is made of."""
        return sum(part.stored.nbytes for part in self.parts)

    def read(self) -> Tensor:
        """Read and convert the parts; returns a host tensor in the data type of the file.

        Raises:
            ConfigError: a part has a quantised data type.
        """
        tensors = {part.key: part.stored.read() for part in self.parts}
        return converted(self.target, self.parts, tensors, converter=self.converter, module=self.module)[self.name]


def read_any(stored: AnyStored | ConvertedTensor) -> Tensor:
    """Read a tensor, which may be one of integers or booleans: buffers are.

    Raises:
        ConfigError: the data type is none that torch computes with here.
    """
    is_code = isinstance(stored, StoredTensor) and stored.dtype in CODES
    return stored.read_as_stored() if is_code else stored.read()  # type: ignore[union-attr]  # only a StoredTensor is


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
    stored: Mapping[str, AnyStored], module: PreTrainedModel
) -> dict[str, AnyStored | ConvertedTensor]:
    """Return name, shape and source of every tensor of a checkpoint, named as in `module`.

    Args:
        module: an instance of the checkpoint's class on the meta device.
    """
    transforms = get_model_conversion_mapping(module)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    own = module.state_dict()
    found: dict[str, AnyStored | ConvertedTensor] = {}
    first: dict[str, str] = {}
    parts: dict[str, list[Part]] = defaultdict(list)
    for key in sorted(stored, key=dot_natural_key):  # experts are stacked in this order
        name, pattern = rename_source_key(key, renamings, converters, module.base_model_prefix, own)
        if name not in own and key in own:  # as transformers: a name of today that an old name's pattern matches too
            name, pattern = rename_source_key(key, [], [], module.base_model_prefix, own)
        if pattern is None:
            if name in found:
                raise ConfigError(
                    f"model.path={stored[key].file.parent}; the checkpoint has {first[name]!r} and {key!r}, which are "
                    f"both {name!r} of {type(module).__name__}; remove the one that is not the model's."
                )
            found[name], first[name] = stored[key], key
        else:
            parts[name].append(Part(key, pattern, stored[key]))
    for target, some in parts.items():
        converter = by_pattern[some[0].pattern]
        empty = {part.key: torch.empty(part.stored.shape, device="meta") for part in some}
        try:
            made = converted(target, tuple(some), empty, converter=converter, module=module)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"model.path={some[0].stored.file.parent}; the checkpoint's {len(some)} tensors for {target}, first "
                f"{some[0].key!r}, do not go together ({one_line(error)}); some of them are missing, or "
                "they are not those of its config.json."
            ) from error
        for name, tensor in made.items():
            found[name] = ConvertedTensor(name, tuple(tensor.shape), target, tuple(some), converter, module)
    return found
