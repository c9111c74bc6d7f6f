"""The safetensors of a Hugging Face checkpoint folder: an index, and one tensor at a time.

Tensors are read, not memory-mapped: a mapped tensor that is copied to a device is resident twice. Layout of a file
(github.com/huggingface/safetensors, "Format"): length of the header (u64, little endian), JSON header, data.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tpu_experiments.config.errors import ConfigError

WEIGHTS_INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    """Location of one tensor in a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset in bytes from the beginning of the file."""

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
        dtype = DTYPES[self.dtype]
        content = torch.empty(math.prod(self.shape) * dtype.itemsize, dtype=torch.uint8)
        with self.file.open("rb") as file:
            file.seek(self.start)
            count = file.readinto(memoryview(content.numpy()))  # type: ignore[arg-type]  # numpy 2.1 types it so
        assert count == content.numel(), "safe_open checked the length of the file"
        return content.view(dtype).view(self.shape)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a checkpoint folder by name.

    Raises:
        ConfigError: the folder has no safetensors, or its index and its files disagree.
    """
    if (folder / WEIGHTS_INDEX).exists():
        return _indexed(folder)
    if (folder / WEIGHTS).exists():
        return _tensors_of(folder / WEIGHTS)
    raise ConfigError(
        f"model.path={folder}; no {WEIGHTS} and no {WEIGHTS_INDEX} there; save the model with save_pretrained."
    )


def _indexed(folder: Path) -> dict[str, StoredTensor]:
    try:
        file_of: dict[str, str] = json.loads((folder / WEIGHTS_INDEX).read_text())["weight_map"]
        if not isinstance(file_of, dict) or not all(isinstance(f, str) and len(f) < 256 for f in file_of.values()):
            raise TypeError("weight_map is no object of file names")
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
    return {name: held[file][name] for name, file in file_of.items()}


def _tensors_of(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, framework="pt"):  # checks the header and the length, maps nothing yet
            pass
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"model.path={file.parent}; {file.name} is not a complete safetensors file ({error}); download it again."
        ) from error
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(file, facts["dtype"], tuple(facts["shape"]), 8 + length + facts["data_offsets"][0])
        for name, facts in header.items()
    }
