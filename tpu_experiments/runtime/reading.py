"""From a device to the host, whatever the device."""

from torch import Tensor


def host_copy(tensor: Tensor) -> Tensor:
    """The whole tensor in the host's memory, a copy also of one that lies there; waits for the device.

    No program is compiled for it, so that it may happen between any two steps.
    """
    if tensor.device.type != "xla":
        return tensor.detach().to("cpu", copy=True)
    from tpu_experiments.runtime.xla_reading import gathered

    return gathered(tensor)
