"""Values of a device, kept beside the tensors that stand for them.

A program is traced on tensors of the meta device, which have no values. The tensors that a run holds are such tensors
too, and their values are arrays of jax, found by the storage that a tensor shares with its parameter and its views.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tpu_experiments.runtime.boxes import Box


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """Return what a placed tensor and the parameter made of it have in common."""
    return StorageWeakRef(tensor.untyped_storage())


class Buffers:
    """Arrays by storage, with the version that a tensor had when its array was set."""

    def __init__(self) -> None:
        self._arrays: dict[StorageWeakRef, tuple[Any, int]] = {}

    def stands_for(self, array: Any, *, like: Tensor) -> Tensor:
        """Return a new tensor of the meta device for an array."""
        made = torch.empty(like.shape, dtype=like.dtype, device="meta")
        self[made] = array
        return made

    def __setitem__(self, tensor: Tensor, array: Any) -> None:
        self._arrays[storage_of(tensor)] = array, tensor._version

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_of(tensor) in self._arrays

    def __getitem__(self, tensor: Tensor) -> Any:
        """Return the array of a tensor.

        Raises:
            RuntimeError: the tensor was made or changed outside a program, so that nobody has its values.
        """
        array, version = self._arrays.get(storage_of(tensor), (None, -1))
        if array is None or version != tensor._version:
            what = "made" if array is None else "changed"
            raise RuntimeError(
                f"a tensor of {tuple(tensor.shape)} was {what} outside a program, where it has no values"
            )
        return array

    def accept(self, tensor: Tensor) -> None:
        """Take the tensor's array for its values, whatever was done to the tensor."""
        array, _ = self._arrays[storage_of(tensor)]
        self[tensor] = array

    def sweep(self) -> None:
        """Free the arrays whose tensors are gone."""
        for storage in [storage for storage in self._arrays if storage.expired()]:
            del self._arrays[storage]


BUFFERS = Buffers()
"""Those of this process's device."""


def array_of(tensor: Tensor, *, device: Any) -> Any:
    """Copy a host tensor, the same on all hosts, to a device of jax or to those of a sharding."""
    import jax
    import ml_dtypes

    host = tensor.detach().contiguous()
    is_bfloat16 = host.dtype == torch.bfloat16
    values = host.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if is_bfloat16 else host.numpy()
    # A copy: on the CPU jax would take the tensor's own memory, which a donation gives away.
    copy = np.array(values)
    if getattr(device, "is_fully_addressable", True):
        return jax.device_put(copy, device)
    return jax.make_array_from_callback(copy.shape, device, lambda index: copy[index])  # this host's devices alone


def fetched(tensor: Tensor) -> Tensor:
    """Return a host copy of a tensor that stands for an array; waits for the device.

    Raises:
        RuntimeError: a part of it is on other hosts alone.
    """
    array = BUFFERS[tensor]
    if array.is_fully_addressable:
        host = torch_of(np.array(array))
    else:
        parts = parts_of(tensor)
        if sum(box.num_elements for box in parts) != array.size:
            raise RuntimeError(f"this host holds only {len(parts)} boxes of a tensor of shape {array.shape}")
        host = torch.empty(array.shape, dtype=tensor.dtype)
        for box, part in parts.items():
            host[box.slices] = torch_of(np.array(part))
    return host.reshape(-1).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).clone()


def parts_of(tensor: Tensor) -> dict[Box, Any]:
    """Return the parts of a tensor that this host's devices hold, each once, in order, by their boxes."""
    array, found = BUFFERS[tensor], dict[Box, Any]()
    for shard in array.addressable_shards:
        sides = [part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True)]
        found.setdefault(Box(tuple(start for start, _ in sides), tuple(stop for _, stop in sides)), shard.data)
    return dict(sorted(found.items()))


def torch_of(values: NDArray[Any]) -> Tensor:
    """Return a host tensor over the memory of an array of numpy, which has no bfloat16 of its own."""
    if str(values.dtype) == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
