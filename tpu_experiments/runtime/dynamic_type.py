"""Values of the 8-bit dynamic data type (arXiv 1511.04561), for scales of NF4 weights and moments of the optimizer."""

import torch

XLA_DEVICES = ("xla", "meta")
"""Devices of tensors in programs that XLA compiles, where values are computed and not looked up in a table, since a TPU
has no fast gather. TorchTPU's programs are traced on the meta device."""
DECADES = range(7)
"""Numbers of the decades (10^(i - 7), 10^(i - 6)], which have 2^i values each, or twice as many without a sign."""


def num_values(decade: int, *, signed: bool) -> int:
    """Return the number of values above 0 in a decade."""
    return int(2**decade * (1 if signed else 2))


def dynamic_values(*, signed: bool) -> tuple[float, ...]:
    """Return the 256 values, sorted, as bitsandbytes' `create_dynamic_map` has them."""
    values = [0.0, 1.0]
    for decade in DECADES:
        bounds = torch.linspace(0.1, 1, num_values(decade, signed=signed) + 1)
        means = 10.0 ** (decade - 6) * ((bounds[:-1] + bounds[1:]) / 2)
        values += [*means.tolist(), *(-means).tolist()] if signed else means.tolist()
    return tuple(sorted(values))


SIGNED, UNSIGNED = dynamic_values(signed=True), dynamic_values(signed=False)
"""Made once, at import: inside a trace, tensors have no values."""
