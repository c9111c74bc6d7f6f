"""Device-to-host copies, for every kind of device."""

from torch import Tensor


def host_copy(tensor: Tensor) -> Tensor:
    """Return a host copy of the whole tensor.

    A tensor on the host is copied too. Blocks until the device is done, and compiles no program, so that it may be
    called between any two steps.
    """
    if tensor.device.type != "xla":
        return tensor.detach().to("cpu", copy=True)
    from tpu_experiments.runtime.xla_reading import gathered

    return gathered(tensor)
