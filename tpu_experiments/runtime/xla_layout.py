"""A sharding annotation on an intermediate value, from the number of devices alone, so that a plan makes the same."""

import numpy as np
import torch_xla
from torch import Tensor
from torch_xla.distributed.spmd.xla_sharding import ShardingType

from tpu_experiments.runtime.layout import Lay


def lay_over(*, num_devices: int) -> Lay:
    """The `Lay` of a program that is split over `num_devices`; torch_xla must be in SPMD mode."""

    def lay(tensor: Tensor, *, split_dim: int | None) -> Tensor:
        named = (tensor * 1).to(tensor.dtype)  # a tensor with a buffer would be moved instead, a placeholder refused
        if split_dim is None:
            sharding = torch_xla._XLAC.OpSharding([], [], [], ShardingType.REPLICATED)
        else:
            tiles = [num_devices if dim == split_dim else 1 for dim in range(tensor.ndim)]
            order = np.arange(num_devices).reshape(tiles).tolist()
            sharding = torch_xla._XLAC.OpSharding(order, [], [], ShardingType.TILED)
        torch_xla._XLAC._xla_mark_sharding(named, sharding)
        return named

    return lay
