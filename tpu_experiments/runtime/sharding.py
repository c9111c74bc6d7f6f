"""Parallelism as data: which dimension of which parameter is split, and the check that every rule does something."""

import fnmatch
import math
from collections.abc import Mapping

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.sources import AXIS, ShardingConfig
from tpu_experiments.runtime.stacked import is_stack


class ShardingTable:
    """First matching glob of `sharding.rules` decides which dimension of a parameter is split."""

    def __init__(self, sharding: ShardingConfig, *, num_devices: int) -> None:
        self.name, self.rules = sharding.name, sharding.rules
        self.max_replicated, self.num_devices = sharding.max_replicated_elements, num_devices

    def axes(self, name: str, shape: tuple[int, ...]) -> tuple[str | None, ...]:
        """Mesh axis per dimension; a stack's axis of layers and a dimension of size 1 are never split.

        Args:
            name: of a parameter, or `<parameter>/<slot>` of optimizer state, which lies as its parameter does.

        Raises:
            ConfigError: the rule has another number of dimensions, or a split dimension is not divisible.
        """
        parameter = name.partition("/")[0]
        if is_stack(parameter):
            return (None, *self._axes(parameter, shape[1:]))
        return self._axes(parameter, shape)

    def split_dim(self, name: str, shape: tuple[int, ...]) -> int | None:
        """The dimension that is split, None where there is none."""
        return next((dim for dim, axis in enumerate(self.axes(name, shape)) if axis), None)

    def _axes(self, name: str, shape: tuple[int, ...]) -> tuple[str | None, ...]:
        for glob, axes in self.rules.items():
            if not name or not _matches(glob, name):
                continue
            if len(axes) != len(shape):
                raise ConfigError(f"sharding.rules[{glob!r}]={axes} has {len(axes)} entries but {name} is {shape}.")
            for size, axis in zip(shape, axes, strict=True):
                if axis and size > 1 and size % self.num_devices:
                    raise ConfigError(
                        f"sharding.rules[{glob!r}]={axes}; {name} is {shape} and {size} does not divide by the "
                        f"{self.num_devices} devices; split the other dimension."
                    )
            return tuple(axis if size > 1 else None for size, axis in zip(shape, axes, strict=True))
        return (None,) * len(shape)

    def check(self, names: Mapping[str, tuple[int, ...]]) -> None:
        """Every rule matches a parameter and every large parameter is split."""
        for glob in self.rules:
            if not any(_matches(glob, name) for name in names):
                raise ConfigError(
                    f"sharding={self.name}; rule {glob!r} matches no parameter. Names look like: "
                    f"{', '.join(sorted(names)[:4])}; correct the glob or remove the rule."
                )
        for name, shape in names.items():
            size = math.prod(shape)
            if self.max_replicated and size > self.max_replicated and not any(self.axes(name, shape)):
                raise ConfigError(
                    f"sharding={self.name} leaves {name} with {size:,} elements whole on every device (limit "
                    f"sharding.max_replicated_elements={self.max_replicated:,}); add a rule or raise the limit."
                )


def batch_axes(ndim: int, *, rows_dim: int) -> tuple[str | None, ...]:
    """Mesh axis per dimension of a batch's tensor: its rows are split, a vector is whole on every device."""
    return tuple(AXIS if dim == rows_dim and ndim > 1 else None for dim in range(ndim))


def _matches(glob: str, name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, part) for part in glob.split("|"))
