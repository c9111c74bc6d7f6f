"""Prints how far the gated delta rule's kernel, split over four (virtual) devices, is from plain operations on one.

    python -m tests.models.split_delta

A process of its own: torch_xla is told once how many devices the CPU has, and whether they are one.
"""

import os

os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from tests.models import test_delta_kernel as rule
from tpu_experiments.config.mesh import Axes, Mesh
from tpu_experiments.runtime.kernels.delta import OF_PRODUCTS, install_delta_kernel
from tpu_experiments.runtime.kernels.on_xla import XlaDeltaRule
from tpu_experiments.runtime.xla.layout import Spec, xla_mesh

CASES = {
    "rows split": (Mesh(fsdp=4), 4, 3),
    "rows and heads split": (Mesh(fsdp=2, tensor=2), 2, 4),
    "neither divides": (Mesh(fsdp=2, tensor=2), 3, 3),
}
"""Mesh, rows and heads."""


def apart(mesh: Mesh, rows: int, heads: int) -> float:
    """Return the largest difference relative to the largest value of each tensor."""

    def placed(whole: torch.Tensor) -> torch.Tensor:
        axes: Axes = ("fsdp",) if rows % mesh.fsdp == 0 else ()
        spec = Spec(xla_mesh(mesh), mesh.named(axes + (None,) * (whole.ndim - len(axes))))
        return xm.send_cpu_data_to_device([whole.contiguous()], torch_xla.device(), spec)[0]

    given = rule.inputs(tokens=256, rows=rows, heads=heads)
    segments = torch.cat([torch.full((rows, 100), 1), torch.full((rows, 156), 2)], 1).int()
    install_delta_kernel(XlaDeltaRule(mesh=mesh, flops=OF_PRODUCTS, target="interpreted"))
    found = rule.computed([placed(each) for each in given], placed(segments))
    # after XLA's backward pass: one on the CPU before it would fix autograd's queues without XLA's
    return max(rule.apart(found, rule.computed(given, segments)).values())


def main() -> None:
    """Print a line for each case."""
    xr.use_spmd()
    torch_xla.device()
    for name, case in CASES.items():
        print(apart(*case), name)


if __name__ == "__main__":
    main()
