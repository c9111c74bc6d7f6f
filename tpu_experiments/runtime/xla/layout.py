"""Sharding annotations on intermediate tensors, and sharded tensors read back shard by shard.

An annotation is made from the mesh's sizes alone, so that a plan makes the same."""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch_xla.distributed.spmd.xla_sharding import ShardingType

from tpu_experiments.config.mesh import Axes, Mesh, Split
from tpu_experiments.runtime.base import Batch
from tpu_experiments.runtime.boxes import Box
from tpu_experiments.runtime.ops import Constrain


def constraints_over(mesh: Mesh) -> Constrain:
    """Return the `Constrain` of a program sharded over the mesh; torch_xla must be in SPMD mode."""

    def constrain(tensor: Tensor, *, axes: Axes) -> Tensor:
        # `* 1` makes an intermediate value: a tensor with a buffer would be resharded, and a placeholder is refused.
        named = (tensor * 1).to(tensor.dtype)
        split = mesh.split(mesh.named(axes), ndim=tensor.ndim)
        torch_xla._XLAC._xla_mark_sharding(named, _annotation(split))
        return named

    return constrain


def _annotation(split: Split) -> object:
    if split.is_whole:
        return torch_xla._XLAC.OpSharding([], [], [], ShardingType.REPLICATED)
    devices = np.array(split.devices)
    if split.copies == 1:
        return torch_xla._XLAC.OpSharding(devices.reshape(split.tiles).tolist(), [], [], ShardingType.TILED)
    groups = devices.reshape(-1, split.copies)
    places = np.arange(len(groups)).reshape(split.tiles).tolist()
    return torch_xla._XLAC.OpSharding(
        devices.reshape(*split.tiles, split.copies).tolist(), places, groups.tolist(), ShardingType.PARTIAL
    )


def replicated_results(function: Callable[[Batch], Any], *, constrain: Constrain) -> Callable[[Batch], Any]:
    """Return `function` with its results replicated; without a constraint XLA chooses how to shard them.

    Tensors of the run that the function writes keep their own sharding.
    """

    def replicate(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{field.name: replicate(getattr(value, field.name)) for field in fields(value)})
        return tree_map_only(Tensor, lambda tensor: constrain(tensor, axes=()), value)

    return lambda batch: replicate(function(batch))


def xla_mesh(mesh: Mesh) -> xs.Mesh:
    """Return torch_xla's mesh with the axes of more than one device."""
    return xs.Mesh(np.arange(mesh.num_devices), tuple(map(mesh.size, mesh.names)), mesh.names)


class Spec(xs.ShardingSpec):
    """torch_xla's ShardingSpec with the sharding type computed by its `Mesh`.

    torch_xla 2.9's own takes a tensor whose dimensions are all sharded for one that is not replicated, also where the
    mesh has further axes.
    """

    def __post_init__(self) -> None:
        if not self.partition_spec:  # a scalar
            super().__post_init__()
            return
        made = self.mesh._get_op_sharding_args(tuple(self.partition_spec))
        self._tile_assignment, self._group_assignment, self._replication_groups, kind = made
        self._sharding_type = ShardingType(kind)


def gathered(tensor: Tensor) -> Tensor:
    """Return a host copy of a sharded or replicated tensor.

    torch_xla's own `.cpu()` of a sharded tensor compiles a program that gathers it, again at every call (2.9,
    PjRtComputationClient::ReplicateShardedData); here each shard is copied to the host and placed by its indices.
    """
    if "devices=" not in torch_xla._XLAC._get_xla_sharding_spec(tensor):
        return tensor.detach().cpu()
    (shards,) = torch_xla._XLAC._get_local_shards([tensor])
    (places,) = torch_xla._XLAC._get_local_shard_replica_and_indices([tensor])
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    boxes = [_box(indices, tensor.shape) for _, indices in places]
    missing = set(boxes)
    if sum(box.num_elements for box in missing) != tensor.numel():
        raise RuntimeError(f"this host holds only {len(missing)} boxes of a tensor of shape {tuple(tensor.shape)}")
    shards.reverse()
    for box in boxes:
        shard, _ = shards.pop()  # frees it once copied: memory holds the tensor and the remaining shards
        if box in missing:  # replicas are equal
            whole[box.slices] = shard[Box.whole(box.shape).slices]  # beyond the tensor's edge a shard has padding
            missing.remove(box)
    return whole


def local_boxes(tensor: Tensor) -> list[Box]:
    """Return the boxes of a tensor that this process's devices hold, each once, in order."""
    if "devices=" not in torch_xla._XLAC._get_xla_sharding_spec(tensor):
        return [Box.whole(tensor.shape)]
    (places,) = torch_xla._XLAC._get_local_shard_replica_and_indices([tensor])
    found = {_box(indices, tensor.shape) for _, indices in places}
    return sorted(box for box in found if box.num_elements) or [Box.whole(tensor.shape)]


def boxes_on_host(tensor: Tensor, boxes: Sequence[Box]) -> list[Tensor]:
    """Return contiguous host copies of boxes that this process's devices hold."""
    if "devices=" not in torch_xla._XLAC._get_xla_sharding_spec(tensor):
        whole = tensor.detach().cpu()
        return [whole[box.slices].clone(memory_format=torch.contiguous_format) for box in boxes]
    (places,) = torch_xla._XLAC._get_local_shard_replica_and_indices([tensor])
    (shards,) = torch_xla._XLAC._get_local_shards([tensor])
    found: dict[Box, Tensor] = {}
    for (_, indices), (shard, _) in zip(places, shards, strict=True):
        box = _box(indices, tensor.shape)
        if box in boxes and box not in found:
            found[box] = shard[Box.whole(box.shape).slices].contiguous()
    return [found[box] for box in boxes]


def _box(indices: Any, shape: Sequence[int]) -> Box:
    """Return the box of torch_xla's indices of a shard: an ellipsis, or a slice for every dimension."""
    if indices is ...:
        return Box.whole(shape)
    return Box(tuple(int(part.start) for part in indices), tuple(int(part.stop) for part in indices))
