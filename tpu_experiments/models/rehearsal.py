"""A forward pass on the meta device, to find inconsistent config values before anything is loaded."""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tpu_experiments.models.forward import attention_input

TOKENS = 8
SHAPES = re.compile(r"shape|size|dimension|mat1|broadcast|must match|divisible", re.IGNORECASE)
"""What torch's errors about shapes contain. Others are due to the meta device, which has no values to read and lacks
some kernels."""


def rehearse(module: nn.Module) -> None:
    """Run the module on one row of the meta device; raises what it raises over inconsistent values."""
    named = (*module.named_parameters(), *module.named_buffers())
    tensors: dict[str, Any] = {name: tensor.detach().to("meta") for name, tensor in named}
    with torch.device("meta"), torch.no_grad():
        ones = torch.ones(1, TOKENS, dtype=torch.int64)
        mask = attention_input(ones, module=module)
        inputs = {"input_ids": ones, "position_ids": ones, "attention_mask": mask, "use_cache": False}
        try:
            functional_call(module, tensors, kwargs=inputs)
        except RuntimeError as error:
            if SHAPES.search(str(error)):
                raise


def gives_tensor(layer: nn.Module, *, module: nn.Module) -> bool:
    """Return whether a layer returns its hidden states alone; true where the meta device cannot run it."""
    given: list[bool] = []
    hook = layer.register_forward_hook(lambda _layer, _inputs, output: given.append(isinstance(output, Tensor)))
    try:
        rehearse(module)
    finally:
        hook.remove()
    return given[0] if given else True
