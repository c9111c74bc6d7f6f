"""Offload of intermediate values of a TPU program to host memory."""

from typing import Any

from torch import Tensor
from torch_xla.experimental import stablehlo_custom_call

from tpu_experiments.runtime.layout import HostMemory


def host_memory_for(device: str) -> HostMemory:
    """Return the transfers to and from host memory for `device`; the identity on every device but a TPU.

    They are annotations that XLA's host offloader reads. It moves the slices of a loop's stacked outputs while the
    loop computes (`dynamic-update-slice-start`).
    """
    if device.lower() != "tpu":
        return HostMemory()
    return HostMemory(put=_placed("pinned_host"), take=_placed("device"))


def _placed(memory: str) -> Any:
    def place(tensor: Tensor) -> Tensor:
        # The same call as torch_xla's place_to_host, without its operator, which registers a backward pass of its own.
        placed: Tensor = stablehlo_custom_call.stablehlo_custom_call(
            [tensor],
            "annotate_device_placement",
            [tensor.shape],
            [tensor.dtype],
            has_side_effect=True,
            frontend_attributes={"_xla_buffer_placement": memory},
        )
        return placed

    return place
