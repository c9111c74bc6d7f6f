"""FLOPs of Pallas kernels: stated by their authors, else derived from attention shapes, else unknown."""

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from tpu_experiments.planning.hlo.text import Kernel, Shape, shapes_in
from tpu_experiments.planning.work import flash_attention_flops

Direction = Literal["forward", "backward", "backward_dkv", "backward_dq"]
FLOATS = ("bf16", "f16", "f32", "f8")


def with_flops(kernels: Iterable[Kernel]) -> tuple[tuple[Kernel, ...], tuple[str, ...]]:
    """Return the kernels with FLOPs where they are known, and a note for each that states none itself."""
    known, notes = [], []
    for kernel in kernels:
        flops = attention_flops(kernel) if kernel.flops is None else kernel.flops
        if kernel.flops is None and flops is None:
            notes.append(f"kernel {kernel.name}: its FLOPs are unknown; only the time of its bytes is in the estimate")
        elif kernel.flops is None:
            notes.append(f"kernel {kernel.name} states no FLOPs; they are those of causal attention of its shapes")
        known.append(replace(kernel, flops=flops))
    return tuple(known), tuple(dict.fromkeys(notes))


def attention_flops(kernel: Kernel) -> float | None:
    """Return the FLOPs of one call of a kernel that is named as an attention; None for others.

    Its operands are queries (..., T, D) first, then keys (..., S, D). The causal half is assumed, and no window: jax's
    splash kernel states no FLOPs and keeps its mask in its operands.
    """
    if "attention" not in kernel.name:
        return None
    arrays = [shape for text in kernel.operand_shapes for shape in shapes_in(text) if is_activation(shape)]
    if len(arrays) < 2:
        return None
    queries, keys = arrays[:2]
    *batch, num_queries, head_dim = queries.dims
    return flash_attention_flops(
        batch=1,
        heads=math.prod(batch),
        queries=num_queries,
        keys=keys.dims[-2] if keys.dims[-1] == head_dim else keys.dims[-1],
        head_dim=head_dim,
        direction=direction_of(kernel.name),
    )


def is_activation(shape: Shape) -> bool:
    """Return whether an array may be queries, keys or values: not a table of the mask, not segment ids."""
    return shape.dtype.startswith(FLOATS) and len(shape.dims) >= 3


def direction_of(name: str) -> Direction:
    """Return the direction of a kernel by its name: `_splash_attention_bwd_dkv` is `backward_dkv`."""
    for part in ("dkv", "dq"):
        if re.search(rf"_{part}\b|_{part}_", name):
            return "backward_dkv" if part == "dkv" else "backward_dq"
    return "backward" if re.search("bwd|backward", name) else "forward"
