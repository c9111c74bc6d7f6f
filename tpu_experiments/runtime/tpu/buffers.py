"""Values of a device, kept beside the tensors that stand for them.

A program is traced on tensors of the meta device, which have no values. The tensors that a run holds are such tensors
too, and their values are arrays of jax, found by the storage that a tensor shares with its parameter and its views.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


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
    """Copy a host tensor to a device of jax."""
    import jax
    import ml_dtypes

    host = tensor.detach().contiguous()
    is_bfloat16 = host.dtype == torch.bfloat16
    values = host.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if is_bfloat16 else host.numpy()
    # A copy: on the CPU jax would take the tensor's own memory, which a donation gives away.
    return jax.device_put(np.array(values), device)


def fetched(tensor: Tensor) -> Tensor:
    """Return a host copy of a tensor that stands for an array; waits for the device."""
    values = np.array(BUFFERS[tensor])
    is_bfloat16 = str(values.dtype) == "bfloat16"  # numpy has no such type
    host = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16) if is_bfloat16 else torch.from_numpy(values)
    return host.reshape(-1).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).clone()
