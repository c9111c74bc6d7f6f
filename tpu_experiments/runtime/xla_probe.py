"""Count of torch_xla's devices, for runtime/probe.py."""

import torch
import torch_xla
import torch_xla.runtime as xr


def devices_seen(device: str) -> tuple[int, str, float]:
    """Return the number of devices of all processes, their type, and 1 + 1 computed on the first."""
    one = torch.ones((), device=torch_xla.device())
    total = float((one + one).cpu())
    kind = xr.device_type() or device
    return xr.global_runtime_device_count(), kind, total
