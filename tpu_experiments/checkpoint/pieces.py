"""Pieces of tensors that are sharded over the hosts of a run: which host writes which, and how files name them.

A file of one host is called `host-01-of-04.parameters.safetensors` and holds pieces: the entry `NAME@512,0/4096,64` is
the part of tensor NAME, of shape (4096, 64), that begins at row 512 and column 0. So name, place and global shape are
in the header, which the file's checksum covers, and any reader of safetensors files can put a tensor together.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from tpu_experiments.runtime.boxes import Box, have_overlap
from tpu_experiments.runtime.stacked import hugging_face_names, is_stack

ENTRY = re.compile(r"(?P<name>.+)@(?P<start>[\d,]*)/(?P<shape>[\d,]*)")
NUMBERS = re.compile(r"(?:(?:0|[1-9]\d{0,17})(?:,(?:0|[1-9]\d{0,17}))*)?")
Boxes = Mapping[str, Sequence[Box]]
"""Boxes by the name of their tensor on the device, which may be a stack over layers."""


class Described(Protocol):
    """Anything with the type and the shape of a tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Data type."""

    @property
    def shape(self) -> Sequence[int]:
        """Sizes."""


Item = TypeVar("Item", bound=Described)


@dataclass(frozen=True)
class Piece(Generic[Item]):
    """One part of a tensor, or a whole one, and what holds it: a host tensor, or a place in storage."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box
    item: Item

    @classmethod
    def whole(cls, item: Item) -> "Piece[Item]":
        """Return the piece that is a whole tensor."""
        return cls(tuple(item.shape), Box.whole(item.shape), item)

    @property
    def is_whole(self) -> bool:
        """Return whether the piece is the whole tensor."""
        return self.box.is_whole(self.shape)


def entry_name(name: str, box: Box, shape: Sequence[int]) -> str:
    """Return the name of a piece in its file.

    >>> entry_name("lm_head.weight", Box((512, 0), (1024, 64)), (4096, 64))
    'lm_head.weight@512,0/4096,64'
    """
    return f"{name}@{','.join(map(str, box.start))}/{','.join(map(str, shape))}"


def piece_of(entry: str, item: Item) -> tuple[str, Piece[Item]]:
    """Return the tensor's name and the piece of an entry of a host's file.

    Raises:
        ValueError: the entry is no piece, or reaches beyond its tensor.
    """
    found = ENTRY.fullmatch(entry)
    if found is None or not NUMBERS.fullmatch(found["start"]) or not NUMBERS.fullmatch(found["shape"]):
        raise ValueError(f"{entry[:200]} is not the name of a piece, NAME@START/SHAPE")
    start, shape = (tuple(map(int, found[key].split(","))) if found[key] else () for key in ("start", "shape"))
    size = tuple(item.shape)
    if not len(start) == len(shape) == len(size):
        raise ValueError(f"{entry[:200]} has {len(size)} dimensions, unlike its name")
    box = Box(start, tuple(map(int.__add__, start, size)))
    if not box.is_inside(shape):
        raise ValueError(f"{entry[:200]} of shape {size} reaches beyond its tensor of shape {shape}")
    return found["name"], Piece(shape, box, item)


def require_tiling(name: str, pieces: Sequence[Piece[Item]]) -> None:
    """Require the pieces to be one tensor: alike, without an overlap, and with every element.

    Raises:
        ValueError: they are not; the text names the tensor.
    """
    kinds = {(piece.shape, piece.item.dtype) for piece in pieces}
    if len(kinds) > 1:
        raise ValueError(f"the pieces of {name[:200]} belong to {len(kinds)} tensors of other shapes or types")
    if have_overlap([piece.box for piece in pieces]):
        raise ValueError(f"two pieces of {name[:200]} overlap, or it is in two files")
    (shape, _), held = kinds.pop(), sum(piece.box.num_elements for piece in pieces)
    total = Box.whole(shape).num_elements
    if held != total:
        raise ValueError(f"the pieces of {name[:200]} hold {held:,} of its {total:,} elements")


def assembled(pieces: Sequence[Piece[Tensor]]) -> Tensor:
    """Return the tensor of host pieces; a single whole piece is returned as it is."""
    if len(pieces) == 1 and pieces[0].is_whole:
        return pieces[0].item
    tensor = torch.empty(pieces[0].shape, dtype=pieces[0].item.dtype)
    for piece in pieces:
        tensor[piece.box.slices] = piece.item
    return tensor


def parts_of(name: str, shape: Sequence[int], box: Box) -> list[tuple[str, tuple[int, ...], Box, int | None]]:
    """Return the pieces of a device tensor's box under Hugging Face's names, one for each layer of a stack.

    Each is the name, the shape of that tensor, the box in it, and the layer's index in the stack (None without one).
    """
    if not is_stack(name):
        return [(name, tuple(shape), box, None)]
    layers = range(box.start[0], box.stop[0])
    names = hugging_face_names(name)
    return [(names[layer], tuple(shape[1:]), box.without_first(), layer) for layer in layers]


def dealt(held: Sequence[Boxes], tensors: Mapping[str, Tensor], *, loads: list[int]) -> list[dict[str, list[Box]]]:
    """Deal every box of all tensors to one of the hosts that hold it: to the one with the fewest bytes so far.

    Larger boxes are dealt first, so that what several hosts hold evens out the rest. Each host computes the same.

    Args:
        held: boxes of each host, by rank.
        tensors: the tensors by name; only shapes and types are read.
        loads: bytes that each host has to write, which those of these tensors are added to.

    Raises:
        RuntimeError: the boxes of a tensor overlap, or a part of it is on no host.
    """
    num_bytes: dict[tuple[str, Box], int] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    for name, tensor in tensors.items():
        for rank, boxes in enumerate(held):
            for box in boxes[name]:
                holders.setdefault((name, box), []).append(rank)
                num_bytes[name, box] = box.num_elements * tensor.element_size()
        distinct = list({box for boxes in held for box in boxes[name]})
        if have_overlap(distinct) or sum(box.num_elements for box in distinct) != tensor.numel():
            raise RuntimeError(f"{name}; the hosts hold other parts of it than a sharding over one mesh gives")
    found: list[dict[str, list[Box]]] = [{} for _ in held]
    for name, box in sorted(holders, key=lambda key: (-num_bytes[key], key)):
        rank = min(holders[name, box], key=lambda each: (loads[each], each))
        loads[rank] += num_bytes[name, box]
        found[rank].setdefault(name, []).append(box)
    return found


def deal_files(sizes: Mapping[str, int], *, num_hosts: int) -> list[list[str]]:
    """Deal files to hosts so that each has about as many bytes to read, the largest first."""
    loads = [0] * num_hosts
    found: list[list[str]] = [[] for _ in range(num_hosts)]
    for name in sorted(sizes, key=lambda each: (-sizes[each], each)):
        rank = loads.index(min(loads))
        loads[rank] += sizes[name]
        found[rank].append(name)
    return found
