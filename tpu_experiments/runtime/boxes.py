"""Boxes: parts of a tensor along its dimensions, as a device or a host holds them of a sharded one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True, order=True)
class Box:
    """A part of a tensor: along every dimension the indices from `start` to below `stop`."""

    start: Shape
    stop: Shape

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> Shape:
        """Return the box's sizes."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def num_elements(self) -> int:
        """Return the number of elements in the box."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the index of the box in its tensor."""
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Return whether the box is all of a tensor of this shape."""
        return self == Box.whole(shape)

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Return whether the box is a part of a tensor of this shape."""
        sides = zip(self.start, self.stop, shape, strict=False)
        return len(self.start) == len(shape) and all(0 <= start <= stop <= size for start, stop, size in sides)

    def overlap(self, other: "Box") -> "Box | None":
        """Return the elements in both boxes; None where there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(int.__lt__, start, stop)) else None

    def relative_to(self, outer: "Box") -> "Box":
        """Return the box counted from the start of `outer`, which contains it."""
        start = tuple(map(int.__sub__, self.start, outer.start))
        return Box(start, tuple(map(int.__add__, start, self.shape)))

    def without_first(self) -> "Box":
        """Return the box in one slice along the first dimension, of which it must have a part."""
        return Box(self.start[1:], self.stop[1:])


def have_overlap(boxes: Sequence[Box]) -> bool:
    """Return whether two of the boxes, of one tensor, have an element in common."""
    if len(boxes) < 2:
        return False
    starts, stops = np.array([box.start for box in boxes]), np.array([box.stop for box in boxes])
    if not starts.shape[1]:
        return True  # a scalar has one element
    crossing = (starts[:, None] < stops[None]) & (starts[None] < stops[:, None])
    num_pairs = int(np.all(crossing, axis=2).sum())
    return num_pairs > sum(box.num_elements > 0 for box in boxes)  # each crosses itself
