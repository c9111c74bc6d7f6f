"""Prints how far routed experts with adapters, with tokens split over four (virtual) devices, are from one device's.

    python -m tests.models.split_experts

A line for experts that divide by the devices and are split over them, and for six that are whole on each.

A process of its own: torch_xla is told once how many devices the CPU has, and whether they are one.
"""

import os

os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from tests.models import test_experts
from tpu_experiments.config.mesh import Axes, Mesh
from tpu_experiments.models.parts.experts import STATIC
from tpu_experiments.runtime.kernels.grouped import GroupedProducts, install_grouped_products
from tpu_experiments.runtime.xla.layout import Spec, xla_mesh

MESH = Mesh(fsdp=4)


def on_four(tensor: torch.Tensor, *, axes: Axes) -> torch.Tensor:
    """Split the first dimension over the axes."""
    spec = Spec(xla_mesh(MESH), MESH.named(axes + (None,) * (tensor.ndim - len(axes))))
    return xm.send_cpu_data_to_device([tensor.detach().contiguous()], torch_xla.device(), spec)[0]


def main() -> None:
    """Print `split` or `whole`, and the largest difference relative to the largest value of each tensor."""
    xr.use_spmd()
    torch_xla.device()
    for name, number in (("split", 4), ("whole", 6)):
        test_experts.EXPERTS = number
        test_experts.SIZES |= dict.fromkeys(("num_experts", "num_local_experts"), number)
        install_grouped_products(GroupedProducts(MESH, target="interpreted"))
        experts, given = test_experts.adapted("qwen3_moe"), test_experts.inputs(tokens=4 * test_experts.TOKENS)
        for key, parameter in list(experts.named_parameters()):
            laid: Axes = ("fsdp",) if name == "split" else ()
            path, _, leaf = key.rpartition(".")
            setattr(experts.get_submodule(path), leaf, torch.nn.Parameter(on_four(parameter, axes=laid)))
        placed = [on_four(tensor, axes=("fsdp",)) for tensor in given]
        found = test_experts.gradients(experts, placed, implementation=STATIC)
        install_grouped_products(None)
        # after XLA's backward pass: one on the CPU before it would fix autograd's queues without XLA's
        wanted = test_experts.gradients(test_experts.adapted("qwen3_moe"), given, implementation=STATIC)
        print(name, test_experts.worst(found, wanted))


if __name__ == "__main__":
    main()
