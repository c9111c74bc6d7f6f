"""Export of a whole model in Hugging Face's layout: a fully trained model, or a randomly drawn base."""

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from tpu_experiments.export.generation import GENERATION_CONFIG
from tpu_experiments.export.tokenizer import write_tokenizer
from tpu_experiments.storage import paths
from tpu_experiments.storage.tensors import chunks_of, file_name, group_in, shards

MODEL = "model"
"""Group name of the files: `model.safetensors`, or several like `model-00001-of-00005.safetensors` with an index."""
INDEX = "model.safetensors.index.json"
BUFFERS = "buffers"
"""Key of a file's metadata: the names, in JSON, of its tensors that are buffers, which no run trains."""


def write_model(
    folder: str,
    *,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    config: PretrainedConfig,
    architecture: str,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None,
    shapes: Mapping[str, Tensor] | None = None,
    max_shard_bytes: float = math.inf,
    generation: str | None = None,
    quantization: Mapping[str, Any] | None = None,
    lines: Iterable[str] = (),
) -> dict[str, str]:
    """Write host `tensors` under Hugging Face's names with config and tokenizer.

    Args:
        tensors: cast to `dtype`, buffers and those of a quantised model to the data types of `shapes`.
        architecture: class name, for `architectures` in config.json.
        tokenizer: None writes none.
        shapes: tensors of the same names and shapes in the order of `tensors`, which is then consumed with one file's
            tensors in memory at a time; None: all tensors are held in memory.
        max_shard_bytes: bytes of tensors in a file; where there are more, there are several files and an index.
        generation: text of generation_config.json; None writes none.
        quantization: `quantization_config` of config.json; None for weights that are all in `dtype`. With it, `shapes`
            has the data types too, and sizes that may be larger than those of the tensors.
        lines: text that the tokenizer, read back, is compared on; see `write_tokenizer`.

    Returns:
        SHA-256 of each file of tensors by its name.

    Raises:
        ConfigError: beside such a config.json, transformers reads the tokenizer otherwise.
    """
    if shapes is None:
        tensors = shapes = dict(tensors)
    paths.make_dirs(folder)
    _remove_earlier(folder)
    is_own = {name: quantization is not None or isinstance(t, nn.Buffer) for name, t in shapes.items()}
    dtypes = {name: t.dtype if is_own[name] else dtype for name, t in shapes.items()}
    items = iter(tensors.items() if isinstance(tensors, Mapping) else tensors)
    digests = _write_weights(folder, items, shapes=shapes, dtypes=dtypes, max_shard_bytes=max_shard_bytes)
    values = config.to_diff_dict() | {"architectures": [architecture], "dtype": str(dtype).removeprefix("torch.")}
    values |= {} if quantization is None else {"quantization_config": dict(quantization)}
    paths.write_text_atomic(paths.join(folder, "config.json"), json.dumps(values, indent=2))
    if generation is not None:
        paths.write_text_atomic(paths.join(folder, GENERATION_CONFIG), generation)
    if tokenizer is not None:
        write_tokenizer(folder, tokenizer, config=config, lines=lines)
    return digests


def _write_weights(
    folder: str,
    items: Iterator[tuple[str, Tensor]],
    *,
    shapes: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    max_shard_bytes: float,
) -> dict[str, str]:
    """Write tensors in their data types, and the index of several files; return the SHA-256 of each file."""
    sizes = {name: t.numel() * dtypes[name].itemsize for name, t in shapes.items()}
    files = shards(sizes, max_bytes=max_shard_bytes)
    by_name = {file_name(MODEL, number, len(files)): names for number, names in enumerate(files, start=1)}
    total = {"total_parameters": sum(t.numel() for t in shapes.values()), "total_size": 0}

    def cast() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in items:
            written = tensor.detach().to(dtypes[name]).contiguous()
            del tensor  # otherwise it stays allocated while the next one is read
            total["total_size"] += written.nbytes
            yield name, written

    buffers = {name for name, t in shapes.items() if isinstance(t, nn.Buffer)}
    digests = _write_files(folder, by_name, cast(), buffers=buffers)
    if len(files) > 1:
        index = {"metadata": total, "weight_map": {name: file for file, names in by_name.items() for name in names}}
        paths.write_text_atomic(paths.join(folder, INDEX), json.dumps(index, indent=2, sort_keys=True) + "\n")
    return digests


def _remove_earlier(folder: str) -> None:
    """Remove the model files of an interrupted export.

    It may have had other file names, and a reader prefers a single file to an index.
    """
    for name in paths.list_names(folder):
        if group_in(name) == MODEL or name == INDEX:
            paths.remove_tree(paths.join(folder, name))


def _write_files(
    folder: str, files: Mapping[str, list[str]], items: Iterator[tuple[str, Tensor]], *, buffers: Collection[str]
) -> dict[str, str]:
    """Write each file as soon as `items` has yielded its tensors; return the SHA-256 of each file."""
    digests: dict[str, str] = {}
    waiting: dict[str, Tensor] = {}
    for file, names in files.items():
        while not waiting.keys() >= set(names):
            waiting |= [next(items)]
        own = [name for name in names if name in buffers]
        tensors = {name: waiting.pop(name) for name in names}
        digests[file] = _write(paths.join(folder, file), tensors, metadata={BUFFERS: json.dumps(own)} if own else {})
    return digests


def _write(place: str, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256()

    def counted() -> Iterator[memoryview]:
        for chunk in chunks_of(tensors, metadata={"format": "pt", **metadata}):
            digest.update(chunk)
            yield chunk

    paths.write_chunks_atomic(place, counted())
    return digest.hexdigest()
