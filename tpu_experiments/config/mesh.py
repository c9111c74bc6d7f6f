"""The device mesh of `hw.parallel: spmd`: number of devices along each axis, and their order.

Imports no torch. Devices are numbered as libtpu numbers them, with `data` varying slowest and `tensor` fastest, so that
devices that exchange the most data are neighbours: activations are summed along `tensor`, whole weights are fetched
along `fsdp`, and only gradients are summed along `data`. jax's mesh_utils, which MaxText calls, orders the axes in the
same way.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.model_schema import AXES, ROWS, MeshConfig, ShardingConfig
from tpu_experiments.config.schema import Config

Axes = tuple[str | tuple[str, ...] | None, ...]
"""Mesh axis or axes that each dimension of a tensor is split over, None for a dimension that is not split. Trailing
dimensions that are left out are not split."""


@dataclass(frozen=True)
class Split:
    """Division of a tensor over devices: `tiles` parts of every dimension, each part on `copies` devices."""

    tiles: tuple[int, ...]
    copies: int
    devices: tuple[int, ...]
    """Device numbers of the first part, then of the second, and so on; the last dimension varies fastest."""
    is_whole: bool
    """Whether every device holds the whole tensor."""


@dataclass(frozen=True)
class Mesh:
    """Number of devices along each axis."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def num_devices(self) -> int:
        """Return the number of all devices."""
        return self.data * self.fsdp * self.tensor

    @property
    def num_shards(self) -> int:
        """Return the number of parts that the rows of a batch are split into."""
        return self.data * self.fsdp

    @property
    def names(self) -> tuple[str, ...]:
        """Return the axes of more than one device, and `fsdp`."""
        return tuple(name for name in AXES if name == "fsdp" or self.size(name) > 1)

    def size(self, axis: str | tuple[str, ...] | None) -> int:
        """Return the number of parts along an axis, or along several together."""
        names = (axis,) if isinstance(axis, str) else axis or ()
        return math.prod(int(getattr(self, name)) for name in names)

    def parts(self, axes: Axes) -> int:
        """Return the number of parts that a tensor is split into."""
        return math.prod(self.size(axis) for axis in axes)

    def named(self, axes: Sequence[str | Sequence[str] | None]) -> Axes:
        """Return `axes` without those along which the mesh has one device."""
        found: list[str | tuple[str, ...] | None] = []
        for axis in axes:
            given = (axis,) if isinstance(axis, str) else axis or ()
            kept = tuple(name for name in given if name in self.names)
            found.append(kept[0] if len(kept) == 1 else kept or None)
        return tuple(found)

    def split(self, axes: Axes, *, ndim: int) -> Split:
        """Return how a tensor with `ndim` dimensions is split."""
        groups = [(axis,) if isinstance(axis, str) else axis or () for axis in axes]
        groups += [()] * (ndim - len(groups))
        order = [name for group in groups for name in group]
        order += [name for name in AXES if name not in order]
        tiles = tuple(self.size(group) for group in groups)
        copies = self.num_devices // math.prod(tiles)
        is_whole = not any(axes) or copies == self.num_devices > 1
        return Split(tiles, copies, tuple(self._walk(order)), is_whole)

    def sharding_text(self, axes: Sequence[Any]) -> str:
        """Return a sharding in XLA's notation.

        `{devices=[8,1]<=[8]}` splits the first of two dimensions over 8 chips in their order. `{devices=[1,2,2]0,2,1,3
        last_tile_dim_replicate}` splits the second of two over pairs of chips that hold the same.
        """
        split = self.split(self.named(axes), ndim=len(axes))
        if split.is_whole:
            return "{replicated}"
        copies = () if split.copies == 1 else (split.copies,)
        tiles = ",".join(map(str, (*split.tiles, *copies)))
        in_order = split.devices == tuple(range(self.num_devices))
        order = f"<=[{self.num_devices}]" if in_order else ",".join(map(str, split.devices))
        return f"{{devices=[{tiles}]{order}{' last_tile_dim_replicate' if copies else ''}}}"

    def _walk(self, order: Sequence[str]) -> list[int]:
        """Return the device numbers in the order of the axes, the last axis fastest."""
        devices = [0]
        for name in order:
            later = math.prod(self.size(other) for other in AXES[AXES.index(name) + 1 :])
            devices = [device + step * later for device in devices for step in range(self.size(name))]
        return devices


def mesh_of(hw: HwConfig, sharding: ShardingConfig) -> Mesh:
    """Return the configured mesh in `spmd`; otherwise nothing is sharded, and all devices count as `fsdp`.

    Raises:
        ConfigError: the sizes do not multiply to the number of devices.
    """
    if hw.parallel != "spmd":
        return Mesh(fsdp=hw.num_devices)
    return resolved(sharding.mesh, num_devices=hw.num_devices)


def resolved(mesh: MeshConfig, *, num_devices: int) -> Mesh:
    """Return the mesh with -1 replaced by the remaining number of devices.

    Raises:
        ConfigError: a size is 0 or below -1, several are -1, or the sizes do not multiply to `num_devices`.
    """
    sizes = {name: int(getattr(mesh, name)) for name in AXES}
    shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
    if any(size == 0 or size < -1 for size in sizes.values()) or list(sizes.values()).count(-1) > 1:
        raise ConfigError(
            f"sharding.mesh has {shown}; a size is 1 or more, and one of them may be -1, which takes the rest; "
            f"use sharding.mesh.data=1 sharding.mesh.fsdp=-1 sharding.mesh.tensor=1 to split over all devices."
        )
    known = math.prod(size for size in sizes.values() if size > 0)
    rest = num_devices // known if -1 in sizes.values() else 1
    if known * rest != num_devices:
        raise ConfigError(
            f"sharding.mesh has {shown} and hw.num_devices={num_devices}; "
            + (f"{known} does not divide {num_devices}" if -1 in sizes.values() else f"that is {known} devices")
            + f"; choose sizes whose product is {num_devices}, one of them -1 for what the others leave."
        )
    return Mesh(**{name: rest if size == -1 else size for name, size in sizes.items()})


def num_shards(config: Config) -> int:
    """Return the devices, or groups of `sharding.mesh.tensor` devices, that batch rows are split over."""
    return mesh_of(config.hw, config.sharding).num_shards


def row_axes(mesh: Mesh) -> Axes:
    """Return the mesh axes of a tensor whose first dimension is rows."""
    return mesh.named((ROWS,))
