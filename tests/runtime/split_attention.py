"""Prints how far a layer with the kernel, split over four (virtual) devices, is from sdpa on one.

    python -m tests.runtime.split_attention TENSOR ROWS...

TENSOR devices share the heads, the others the rows.

A process of its own: torch_xla is told once how many devices the CPU has, and whether they are one.
"""

import os
import sys

os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from tests.runtime import test_xla_attention as layers
from tpu_experiments.config.mesh import Axes, Mesh
from tpu_experiments.runtime.kernels.attention import install_attention_kernel
from tpu_experiments.runtime.kernels.on_xla import XlaAttention
from tpu_experiments.runtime.xla.layout import Spec, xla_mesh

DEVICES = 4


def on_four(tensor: torch.Tensor, *, mesh: Mesh, axes: Axes = ()) -> torch.Tensor:
    """Split over the axes."""
    named = mesh.named(axes + (None,) * (tensor.ndim - len(axes)))
    spec = Spec(xla_mesh(mesh), named)
    return xm.send_cpu_data_to_device([tensor.contiguous()], torch_xla.device(), spec)[0]


def gradients(rows: int, *, mesh: Mesh) -> tuple[list[torch.Tensor], str]:
    """Output and gradients with the kernel, and whether the output is `split` or `whole` on every device."""
    layers.ROWS, layers.LAYERS = rows, 1
    hidden, weights, segments = layers.inputs()
    by_rows: Axes = ("fsdp",) if rows % mesh.fsdp == 0 else ()
    split = on_four(hidden, mesh=mesh, axes=by_rows).requires_grad_()
    laid: dict[str, Axes] = {name: (None, None, "tensor") for name in "qkv"} | {"o": (None, "tensor")}
    copies = {name: on_four(t, mesh=mesh, axes=laid[name]).requires_grad_() for name, t in weights.items()}
    out = layers.in_a_loop(split, copies, on_four(segments, mesh=mesh, axes=by_rows))
    out.square().sum().backward()
    torch_xla.sync()
    lies = "split" if "devices" in torch_xla._XLAC._get_xla_sharding_spec(out) else "whole"
    return [t.detach().cpu() for t in (out, split.grad, *(copy.grad for copy in copies.values()))], lies


def main(tensor: int, *sizes: int) -> None:
    """Print for each number of rows the largest difference, relative to the largest value of each tensor."""
    xr.use_spmd()
    torch_xla.device()
    mesh = Mesh(fsdp=DEVICES // tensor, tensor=tensor)
    for rows in sizes:
        install_attention_kernel(XlaAttention(mesh=mesh, target="interpreted"))
        found, lies = gradients(rows, mesh=mesh)
        install_attention_kernel(None)
        # after XLA's backward pass: one on the CPU before it would fix autograd's queues without XLA's
        plain = layers.gradients(layers.in_a_loop, "cpu", causal=True)
        worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, plain, strict=True))
        print(rows, worst, lies)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
