"""Prints how far a layer with the kernel, its rows split over four (virtual) devices, is from sdpa on one.

    python -m tests.runtime.split_attention ROWS...

A process of its own: torch_xla is told once how many devices the CPU has, and whether they are one.
"""

import os
import sys

os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from tests.runtime import test_xla_attention as layers
from tpu_experiments.runtime.attention import install_attention_kernel
from tpu_experiments.runtime.xla_attention import XlaAttention

DEVICES = 4


def on_four(tensor: torch.Tensor, *, axis: str | None) -> torch.Tensor:
    """Rows split over the axis, or a copy on each."""
    mesh = xs.Mesh(np.arange(DEVICES), (DEVICES,), ("fsdp",))
    spec = xs.ShardingSpec(mesh, (axis, *[None] * (tensor.ndim - 1)))
    return xm.send_cpu_data_to_device([tensor.contiguous()], torch_xla.device(), spec)[0]


def gradients(rows: int) -> tuple[list[torch.Tensor], str]:
    """Output and gradients with the kernel, and whether the output is `split` or `whole` on every device."""
    layers.ROWS, layers.LAYERS = rows, 1
    hidden, weights, segments = layers.inputs()
    axis = "fsdp" if rows % DEVICES == 0 else None
    split = on_four(hidden, axis=axis).requires_grad_()
    copies = {name: on_four(tensor, axis=None).requires_grad_() for name, tensor in weights.items()}
    out = layers.in_a_loop(split, copies, on_four(segments, axis=axis))
    out.square().sum().backward()
    torch_xla.sync()
    lies = "split" if "devices" in torch_xla._XLAC._get_xla_sharding_spec(out) else "whole"
    return [t.detach().cpu() for t in (out, split.grad, *(copy.grad for copy in copies.values()))], lies


def main(*sizes: int) -> None:
    """Print for each number of rows the largest difference, relative to the largest value of each tensor."""
    xr.use_spmd()
    torch_xla.device()
    for rows in sizes:
        install_attention_kernel(XlaAttention(num_shards=DEVICES, target="interpreted"))
        found, lies = gradients(rows)
        install_attention_kernel(None)
        # after XLA's backward pass: one on the CPU before it would fix autograd's queues without XLA's
        plain = layers.gradients(layers.in_a_loop, "cpu")
        worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, plain, strict=True))
        print(rows, worst, lies)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
