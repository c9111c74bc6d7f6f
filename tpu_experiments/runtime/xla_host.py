"""Intermediate values of a TPU's program that wait in the memory of its host."""

from typing import Any

from torch import Tensor
from torch_xla.experimental import stablehlo_custom_call

from tpu_experiments.runtime.layout import HostMemory


def host_memory_for(device: str) -> HostMemory:
    """The annotations that XLA's host offloader reads; those of other devices know no memory but their own.

    The slices of a loop's stack are then moved while the loop computes (`dynamic-update-slice-start`).
    """
    if device.lower() != "tpu":
        return HostMemory()
    return HostMemory(put=_placed("pinned_host"), take=_placed("device"))


def _placed(memory: str) -> Any:
    def place(tensor: Tensor) -> Tensor:
        # As torch_xla's place_to_host, whose operator registers a backward pass of its own.
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
