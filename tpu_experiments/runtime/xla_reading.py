"""Reading a tensor that is split over the devices of `spmd`, shard by shard."""

import torch
import torch_xla
from torch import Tensor


def gathered(tensor: Tensor) -> Tensor:
    """A copy on the host.

    torch_xla's own `.cpu()` of a split tensor compiles a program that gathers it, anew at every call (2.9,
    PjRtComputationClient::ReplicateShardedData); here each shard is copied as it lies.
    """
    if "devices=" not in torch_xla._XLAC._get_xla_sharding_spec(tensor):
        return tensor.detach().cpu()
    (shards,) = torch_xla._XLAC._get_local_shards([tensor])
    (places,) = torch_xla._XLAC._get_local_shard_replica_and_indices([tensor])
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    shards.reverse()
    for replica, indices in places:
        shard, _ = shards.pop()  # memory has the tensor once, and the shards that are not copied yet
        if replica == 0:  # the others are copies of it; what a shard has beyond the tensor's edge is padding
            inside = ... if indices is ... else tuple(slice(0, part.stop - part.start) for part in indices)
            whole[indices if indices is ... else tuple(indices)] = shard[inside]
    return whole
