"""A computation in float64, of code that computes in float32.

Gradients of float32 are sums of many rounded values: of a small copy of Gemma 4 ours are 1.6e-4, and PEFT's 1.2e-4, of
the largest from what the same code computes in float64, where the two are 2e-13 from each other.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class _Widened(TorchDispatchMode):
    """Makes every tensor that is asked for in float32 in float64: classes cast to float32 on their own."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map(_wide, (args, kwargs or {}))
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_float64(*modules: nn.Module) -> Iterator[None]:
    """Convert the float32 tensors of modules for good, and compute in float64 inside the block."""
    for module in modules:
        for part in module.modules():
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else widened(buffer)
        for parameter in module.parameters():
            parameter.data = widened(parameter.data)
    with _Widened():
        yield


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in float64 if it is float32."""
    return tensor.to(torch.float64) if tensor.dtype == torch.float32 else tensor
