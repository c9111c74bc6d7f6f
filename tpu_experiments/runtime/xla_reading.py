"""Device-to-host copies of tensors sharded over the devices of `spmd`, shard by shard."""

import torch
import torch_xla
from torch import Tensor


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
    shards.reverse()
    for replica, indices in places:
        shard, _ = shards.pop()  # frees it once copied: memory holds the tensor and the remaining shards
        if replica == 0:  # the other replicas are equal; what a shard has beyond the tensor's edge is padding
            inside = ... if indices is ... else tuple(slice(0, part.stop - part.start) for part in indices)
            whole[indices if indices is ... else tuple(indices)] = shard[inside]
    return whole
