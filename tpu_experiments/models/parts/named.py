"""Names of values and of parameters: what a remat policy saves, and what a checkpoint stores."""

from dataclasses import dataclass

import torch
from torch import Tensor

LOW = "low"
"""Name of an adapter's low-rank product A x, r numbers per token, and of DoRA's norms: always saved."""


@dataclass(frozen=True)
class Named:
    """One parameter on the host, under Hugging Face's name."""

    name: str
    tensor: Tensor


def named(x: Tensor, name: str) -> Tensor:
    """Return `x` under a name by which a remat policy can save it.

    Plain torch chooses by the operation (stack/recomputed.py): there it is `x` itself, since the operation and its copy
    cost 5 % of a step of SmolLM2 135M on a CPU.
    """
    return x if type(x) is Tensor and x.device.type in ("cpu", "cuda") else _named(x, name)


@torch.library.custom_op("tpu_experiments::named", mutates_args=())
def _named(x: Tensor, name: str) -> Tensor:
    return x.clone()


@_named.register_fake
def _(x: Tensor, name: str) -> Tensor:
    return torch.empty_like(x)


NAMED = torch.ops.tpu_experiments.named.default
_named.register_autograd(lambda ctx, grad: (grad, None))
