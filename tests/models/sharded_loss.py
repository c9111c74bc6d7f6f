"""Prints losses and gradient norms of the chunked loss over four virtual devices, in a process of its own.

python -m tests.models.sharded_loss      # one JSON line
"""

import json
import os
from typing import Any

NUM_DEVICES = 4


def main() -> None:
    """Frozen and trained, rows and head split over the devices."""
    from tests.config.composing import composed
    from tests.models.test_loss import sample
    from tpu_experiments.runtime.xla.device import XlaRuntime

    config = composed(f"hw.num_devices={NUM_DEVICES}", "hw.parallel=spmd", "sharding=fsdp", "model=gemma3_270m")
    runtime = XlaRuntime(config.hw, sharding=config.sharding)
    hidden, head, batch = sample(rows=NUM_DEVICES)
    rows = runtime.put({**batch, "hidden": hidden}, rows_dim=0)
    placed = runtime.place(head, name="model.embed_tokens.weight")
    print(json.dumps([outcome(rows, placed, runtime=runtime, trained=trained) for trained in (False, True)]))


def outcome(rows: Any, head: Any, *, runtime: Any, trained: bool) -> dict[str, list[float]]:
    """Loss sum of every row, and the norms of the gradients."""
    import torch

    from tests.models.test_loss import chunked

    leaves = [rows["hidden"].detach().requires_grad_(), head.detach().requires_grad_(trained)]
    sums, _ = chunked(runtime.loop, 7, constrain=runtime.constrain, soft_cap=3.0)(*leaves, rows)
    grads = torch.autograd.grad(sums.sum(), leaves if trained else leaves[:1])
    return {"sums": sums.detach().cpu().tolist(), "norms": [float(grad.cpu().norm()) for grad in grads]}


if __name__ == "__main__":
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(NUM_DEVICES)}
    main()
