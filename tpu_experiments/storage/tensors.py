"""safetensors files: written from the tensors' own memory, read as views of the bytes, divided into bounded shards.

The library's `save` and `load` copy every tensor, `save` twice, so that a group would stand in memory two and three
times. Layout: eight bytes with the header's length, little-endian; the header, JSON; the tensors' bytes
(github.com/huggingface/safetensors, README "Format"). A reader takes no file whose header is not exactly that, and
NaN and infinities are named where they come from a file. Shards are filled greedily in order, as transformers'
`max_shard_size` does: a tensor is never divided, so one that is larger than the bound has a file of its own."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.storage import strict_json

MAX_HEADER_BYTES = 100_000_000  # the library's own limit
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
FACTS = {"dtype", "shape", "data_offsets"}
METADATA = "__metadata__"


@dataclass(frozen=True)
class Span:
    """Type and shape of a tensor, and its byte range in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Bytes from the beginning of the file."""
    stop: int

    def view(self, content: bytearray, *, at: int = 0) -> Tensor:
        """Return the tensor whose bytes begin at `at` of `content`, as a view."""
        count = math.prod(self.shape)
        flat = torch.frombuffer(content, dtype=self.dtype, count=count, offset=at) if count else torch.empty(0)
        return flat.to(self.dtype).reshape(self.shape)


def chunks_of(tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None) -> Iterator[memoryview]:
    """Yield the file of contiguous host tensors: its header, then each tensor's bytes, larger types first."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    place = 0
    for name, tensor in ordered:
        stop = place + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": NAME_OF[tensor.dtype], "shape": shape, "data_offsets": [place, stop]}
        place = stop
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        yield _bytes_of(tensor).data if tensor.nbytes else memoryview(b"")


def tensors_in(content: bytearray) -> dict[str, Tensor]:
    """Return the tensors of a file, as views of `content`.

    Raises:
        ValueError: it is no safetensors file; the message has the reason.
    """
    length = header_length(content[:8], num_bytes=len(content))
    return {
        name: span.view(content, at=span.start)
        for name, span in spans_in(content[8 : 8 + length], num_bytes=len(content)).items()
    }


def header_length(first: bytes | bytearray, *, num_bytes: int) -> int:
    """Return the header's length in bytes from the `first` eight bytes of a file of `num_bytes`.

    Raises:
        ValueError: no file of this size can have such a header.
    """
    length = int.from_bytes(first[:8], "little")
    if len(first) < 8 or length > min(MAX_HEADER_BYTES, num_bytes - 8):
        raise ValueError(f"its header should have {length:,} bytes and the file has {num_bytes:,}")
    return length


def spans_in(header: bytes | bytearray, *, num_bytes: int) -> dict[str, Span]:
    """Return the span of each tensor of a file of `num_bytes`, in file order.

    Raises:
        ValueError: it is no safetensors header, or does not match the size of the file; the message has the reason.
    """
    start = 8 + len(header)
    found: dict[str, Span] = {}
    place = start
    for name, facts in sorted(_facts(header).items(), key=lambda item: _offsets(item[1])):
        dtype, shape, stop = _described(name, facts, place=place - start, num_bytes=num_bytes - start)
        found[name] = Span(dtype, tuple(shape), place, start + stop)
        place = start + stop
    if place != num_bytes:
        raise ValueError(f"{num_bytes - place} bytes after its last tensor belong to none")
    return found


def metadata_in(header: bytes | bytearray) -> dict[str, str]:
    """Return the texts that a header has beside the tensors.

    Raises:
        ValueError: it is no safetensors header; the message has the reason.
    """
    found = _table(header).get(METADATA, {})
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def unequal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """Describe how tensors differ from expected ones in names, types, shapes or bits; None if equal."""
    if found.keys() != expected.keys():
        return f"has {len(found)} tensors and {len(found.keys() ^ expected.keys())} names that are not in both"
    for name, tensor in expected.items():
        if (found[name].dtype, found[name].shape) != (tensor.dtype, tensor.shape):
            return f"has {name} as {described(found[name])}, not {described(tensor)}"
        if not _same_bytes(found[name], tensor):
            return f"has other values in {name}"
    return None


def described(tensor: Tensor) -> str:
    """Format the type and shape of a tensor as `float32 (8, 64)`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    values: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return values


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit, NaN included.

    It uses numpy: torch's threads wait for each other at every tensor, so that 448 tensors took 30 s on a busy machine.
    """
    ours, theirs = _bytes_of(one), _bytes_of(other)
    whole = len(ours) - len(ours) % 8
    words = np.array_equal(ours[:whole].view(np.int64), theirs[:whole].view(np.int64))
    return words and np.array_equal(ours[whole:], theirs[whole:])


def _facts(content: bytes | bytearray) -> dict[str, Any]:
    """Parse the header, without its free-text metadata."""
    header = _table(content)
    header.pop(METADATA, None)
    return header


def _table(content: bytes | bytearray) -> dict[str, Any]:
    try:
        header = strict_json.loads(bytes(content))
    except ValueError as error:
        raise ValueError(f"its header is not the JSON of a safetensors file ({error})") from error
    if not isinstance(header, dict):
        raise ValueError("its header is no table of tensors")
    return header


def _offsets(facts: Any) -> tuple[int, int]:
    """Return a tensor's data_offsets as a sort key: an empty tensor precedes one with the same start."""
    try:
        start, stop = map(int, facts["data_offsets"])
    except (TypeError, KeyError, ValueError, OverflowError):
        return -1, -1  # `_described` raises the error
    return start, stop


def _described(name: str, facts: Any, *, place: int, num_bytes: int) -> tuple[torch.dtype, list[int], int]:
    """Return the type, shape and end of a tensor, after checking that it begins at `place`."""
    if not isinstance(facts, dict) or set(facts) != FACTS or str(facts["dtype"]) not in DTYPES:
        raise ValueError(f"{name} is not described as dtype, shape and data_offsets")
    shape, offsets, dtype = facts["shape"], facts["data_offsets"], DTYPES[str(facts["dtype"])]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name} has a shape or data_offsets that are not whole numbers")
    start, stop = offsets
    if start != place or not start <= stop <= num_bytes or stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} of shape {shape} is not where its data_offsets {offsets} say")
    return dtype, shape, stop


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


SUFFIX = ".safetensors"
TENSOR_FILE = re.compile(r"(host-\d{2,5}-of-\d{2,5}\.)?([A-Za-z0-9_]+)(?:-\d{5}-of-\d{5})?\.safetensors")


def shards(sizes: Mapping[str, int], *, max_bytes: float) -> list[list[str]]:
    """Return the names of the tensors of each file; one empty file if there are no tensors.

    Args:
        sizes: bytes of each tensor by name.
        max_bytes: of tensors in a file.

    >>> shards({"a": 3, "b": 3, "c": 9, "d": 1}, max_bytes=6)
    [['a', 'b'], ['c'], ['d']]
    """
    found: list[list[str]] = [[]]
    held = 0
    for name, num_bytes in sizes.items():
        if found[-1] and held + num_bytes > max_bytes:
            found.append([])
            held = 0
        found[-1].append(name)
        held += num_bytes
    return found


def file_name(group: str, number: int, count: int, *, host: tuple[int, int] | None = None) -> str:
    """Return the name of file `number`, from 1, of the `count` files of a group.

    Args:
        host: rank of the host, from 0, and number of hosts, where each has files of its own.

    >>> file_name("optimizer", 2, 5), file_name("optimizer", 1, 1, host=(0, 4))
    ('optimizer-00002-of-00005.safetensors', 'host-00-of-04.optimizer.safetensors')
    """
    owner = "" if host is None else f"host-{host[0]:02d}-of-{host[1]:02d}."
    return f"{owner}{group}{SUFFIX}" if count == 1 else f"{owner}{group}-{number:05d}-of-{count:05d}{SUFFIX}"


def group_in(name: str) -> str | None:
    """Return the group of a file name; None for other names."""
    found = TENSOR_FILE.fullmatch(name)
    return found[2] if found else None


def is_of_host(name: str) -> bool:
    """Return whether a file of tensors is one of several hosts' own, which hold pieces of tensors."""
    found = TENSOR_FILE.fullmatch(name)
    return found is not None and found[1] is not None


EXPONENTS = {
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
}
"""Per type, the integer type of its size and the exponent bits, all set only in NaN and infinities (IEEE 754)."""


def not_finite(tensor: Tensor) -> str | None:
    """Describe how many values of a host tensor are not finite: `3 of 4,096 values`; None if all are.

    The values are read as integers: the signed maximum is at least the exponent mask if a positive value is not finite,
    the unsigned maximum at least the sign bit plus the mask if a negative one is not. That takes 0.14 s of one CPU core
    per GB of bfloat16 (16 tensors of 32 MiB); `isfinite(t).all()`, which makes a mask first, took 2.1 s. It uses numpy
    on one thread, since torch's threads wait for each other at every tensor on a busy machine.
    """
    if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return None
    known = tensor if tensor.dtype in EXPONENTS else tensor.to(torch.float32)
    integer, exponent = EXPONENTS[known.dtype]
    bits = known.detach().contiguous().view(integer).numpy()
    unsigned = bits.view(f"u{bits.dtype.name}")
    sign = 1 << (8 * bits.itemsize - 1)
    if int(bits.max()) < exponent and int(unsigned.max()) < sign + exponent:
        return None
    return f"{int((bits & exponent == exponent).sum()):,} of {tensor.numel():,} values"


def require_finite(tensor: Tensor, *, name: str, place: str) -> None:
    """Check that a host tensor has no NaN or infinite values.

    Args:
        name: the tensor's name in the file or folder `place`.

    Raises:
        ConfigError: it has some.
    """
    bad = not_finite(tensor)
    if bad is not None:
        raise ConfigError(
            f"{place}; it has {bad} of {name} that are NaN or infinite; it is damaged, or was saved by a training that "
            "had diverged: copy it again, or take another one."
        )
