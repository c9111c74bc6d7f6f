"""Tensors of any runtime, read back to the host.

This file is above the runtimes: it alone knows how each keeps the values of a tensor, so none below has to."""

from torch import Tensor


def on_host(tensor: Tensor) -> Tensor:
    """Return a program's result on the host; blocks until it is computed."""
    return host_copy(tensor) if tensor.device.type == "meta" else tensor.cpu()


def host_copy(tensor: Tensor) -> Tensor:
    """Return a host copy of the whole tensor.

    A tensor on the host is copied too. Blocks until the device is done, and compiles no program, so that it may be
    called between any two steps.
    """
    if tensor.device.type == "meta":  # it stands for an array of jax
        from tpu_experiments.runtime.tpu.buffers import fetched

        return fetched(tensor.detach())
    if tensor.device.type == "xla":
        from tpu_experiments.runtime.xla.layout import gathered

        return gathered(tensor)
    return tensor.detach().to("cpu", copy=True)
