"""Checks of loaded tensors for NaN and infinities, with the name and file of a bad one."""

import torch
from torch import Tensor

from tpu_experiments.config.errors import ConfigError

EXPONENTS = {
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
}
"""Per type, the integer type of its size and the exponent bits, all set only in NaN and infinities (IEEE 754)."""


def not_finite(tensor: Tensor) -> str | None:
    """Describe how many values of a host tensor are not finite: `3 of 4,096 values`; None if all are.

    The values are read as integers: the signed maximum is at least the exponent mask if a positive value is not finite,
    the unsigned maximum at least the sign bit plus the mask if a negative one is not. That takes 0.14 s of one CPU core
    per GB of bfloat16 (16 tensors of 32 MiB); `isfinite(t).all()`, which makes a mask first, took 2.1 s. It uses numpy
    on one thread, since torch's threads wait for each other at every tensor on a busy machine.
    """
    if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return None
    known = tensor if tensor.dtype in EXPONENTS else tensor.to(torch.float32)
    integer, exponent = EXPONENTS[known.dtype]
    bits = known.detach().contiguous().view(integer).numpy()
    unsigned = bits.view(f"u{bits.dtype.name}")
    sign = 1 << (8 * bits.itemsize - 1)
    if int(bits.max()) < exponent and int(unsigned.max()) < sign + exponent:
        return None
    return f"{int((bits & exponent == exponent).sum()):,} of {tensor.numel():,} values"


def require_finite(tensor: Tensor, *, name: str, place: str) -> None:
    """Check that a host tensor has no NaN or infinite values.

    Args:
        name: the tensor's name in the file or folder `place`.

    Raises:
        ConfigError: it has some.
    """
    bad = not_finite(tensor)
    if bad is not None:
        raise ConfigError(
            f"{place}; it has {bad} of {name} that are NaN or infinite; it is damaged, or was saved by a training that "
            "had diverged: copy it again, or take another one."
        )
