"""What a form's own rounding does to the trained model, computed without merging anything.

Each weight of the trained model, its adapter beside it, is moved by what the form's rounding moves the weight that is
written. The files must hold that model: what remains between the two is a fault of the writer or of the reader.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpu_experiments.export.gguf import quantised, storage_type

Rounding = Callable[[str, Tensor], Tensor]
"""Returns a float32 weight as the form holds it, in float32, given Hugging Face's name of it."""


def unchanged(name: str, weight: Tensor) -> Tensor:
    """Return a weight that the form holds as it is."""
    return weight


def in_dtype(dtype: torch.dtype) -> Rounding:
    """Return the rounding of a form that holds every weight in a data type."""
    return lambda name, weight: weight.to(dtype).to(torch.float32)


def in_codes(decoded: Callable[[Tensor], Tensor], names: Collection[str], *, others: torch.dtype) -> Rounding:
    """Return the rounding of a form that holds some weights in codes.

    Args:
        decoded: returns the float32 weight that the codes of a weight stand for.
        names: of the weights in codes.
        others: data type of all others.
    """
    plain = in_dtype(others)
    return lambda name, weight: decoded(weight) if name in names else plain(name, weight)


def in_gguf(kind: str) -> Rounding:
    """Return the rounding of a GGUF file of a data type, whose blocks lie along rows."""

    def rounded(name: str, weight: Tensor) -> Tensor:
        from gguf.quants import dequantize

        stored = storage_type(kind, weight.shape)
        return torch.from_numpy(dequantize(quantised(name, weight, stored), stored)).view(weight.shape)

    return rounded


@torch.no_grad()
def round_weights(module: nn.Module, weights: Iterable[tuple[str, Tensor]], rounded: Rounding) -> None:
    """Move the weights of a model in float32 by what a form's rounding moves the weights that are written.

    Args:
        weights: names and float32 tensors that are written, adapters merged.
    """
    parameters = dict(module.named_parameters())
    for name, weight in weights:
        if name not in parameters or not weight.is_floating_point():
            continue  # buffers are written as they are
        error = rounded(name, weight) - weight
        if not bool(error.any()):
            continue
        own, part = parameters[name], module.get_submodule(name.rpartition(".")[0])
        has_length = getattr(part, "lora_magnitude_vector", None) is not None
        if own.dtype == torch.float32 and own.shape == error.shape and not has_length:
            own.add_(error)
        else:  # codes of a quantised base, integers with their adapter folded in, or DoRA, which divides by a norm
            part.register_forward_hook(_adds(error))


def _adds(error_NK: Tensor) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
    return lambda part, given, out: out + F.linear(given[0], error_NK.to(given[0].dtype))
