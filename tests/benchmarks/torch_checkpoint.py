"""Why large checkpoints are not written by torch.distributed.checkpoint (torch 2.9): two saves, and what is there.

    python -m tests.benchmarks.torch_checkpoint

HuggingFaceStorageWriter is the writer that makes safetensors and no pickle. The first save is to a bucket's URL, the
second of a tensor of (8, 8) that is split over four virtual devices of one process.
"""

import os
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open


def main() -> None:
    """Save twice and print what was written."""
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    warnings.simplefilter("ignore")
    import torch.distributed.checkpoint as dcp
    import torch_xla
    import torch_xla.debug.metrics as metrics
    import torch_xla.distributed.spmd as spmd
    import torch_xla.runtime
    from torch_xla.experimental.distributed_checkpoint import SPMDSavePlanner

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        dcp.save({"a": torch.ones(4)}, storage_writer=dcp.HuggingFaceStorageWriter("gs://bkt/x"), no_dist=True)
        print("gs://bkt/x became", sorted(str(p) for p in Path().rglob("*") if p.is_file()))

    torch_xla.runtime.use_spmd()
    tensor = torch.arange(64.0).reshape(8, 8).to("xla")
    spmd.mark_sharding(tensor, spmd.Mesh(np.arange(4), (4,), ("x",)), ("x", None))
    torch_xla.sync()
    for planner in (SPMDSavePlanner(), None):
        before = (metrics.metric_data("CompileTime") or (0,))[0]
        with tempfile.TemporaryDirectory() as folder:
            writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True)
            dcp.save({"w": tensor}, storage_writer=writer, planner=planner, no_dist=True)
            (file,) = Path(folder).glob("*.safetensors")
            with safe_open(file, framework="pt") as opened:
                shape, facts = tuple(opened.get_slice("w").get_shape()), opened.metadata()["DCP_SHARDING_INFO"]
        compiled = (metrics.metric_data("CompileTime") or (0,))[0] - before
        print(f"{type(planner).__name__}: w has {shape} of (8, 8), {facts}; {compiled} programs compiled")


if __name__ == "__main__":
    main()
