"""A layer's weight, and the Hessian of correlated inputs."""

import torch
from torch import Tensor


def correlated_layer(size: int) -> tuple[Tensor, Tensor]:
    """A normal weight (size, size), and a Hessian of its inputs."""
    torch.manual_seed(0)
    weight = torch.randn(size, size)
    mix = torch.randn(size, size) / size**0.5 * 0.7 + torch.eye(size) * 0.5
    inputs = torch.randn(4 * size, size) @ mix
    return weight, inputs.t() @ inputs / len(inputs)
