"""Heads in Pallas kernels for the TPU: their order in memory, and rotary position embedding; jax alone.

Legend: B rows, H query heads, K key/value heads, N either, T tokens, D head dimension."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_experiments.runtime.kernels.attention import LANES, AttentionCall, Target, padded_lanes


def heads_first(flat: Any, *, head_dim: int) -> Any:
    """Transpose (..., T, N D) to (..., N, T, D)."""
    return jnp.swapaxes(flat.reshape(*flat.shape[:-1], -1, head_dim), -2, -3)


def heads_last(tensor: Any) -> Any:
    """Transpose (..., N, T, D) to (..., T, N D), the inverse of `heads_first`."""
    return jnp.swapaxes(tensor, -2, -3).reshape(*tensor.shape[:-3], tensor.shape[-2], -1)


def rotated(
    flat: Any, rotation: Any, *, call: AttentionCall, factor: float, target: Target, backward: bool = False
) -> Any:
    """Apply rope to every head of (B, T, N D) and multiply by `factor`; computed in float32.

    The formula is that of transformers' `apply_rotary_pos_emb`: x cos + rotate_half(x) sin, with
    rotate_half (a, b) = (-b, a).

    Args:
        rotation: cosine and sine, (2, B, T, D).
        backward: compute the gradient of x from the gradient of the output instead.
    """

    def kernel(x_ref: Any, rotation_ref: Any, out_ref: Any) -> None:
        turned = rotate(x_ref[...], rotation_ref[0], rotation_ref[1], backward=backward)
        out_ref[...] = (turned * factor).astype(out_ref.dtype)

    rows, length, width = flat.shape
    block, head_dim = call.block, call.head_dim
    given = flat if call.is_flat else heads_first(flat, head_dim=head_dim)
    if call.is_flat:
        heads = pl.BlockSpec((None, block, head_dim), lambda row, token, head: (row, token, head))
    else:
        heads = pl.BlockSpec((None, None, block, head_dim), lambda row, token, head: (row, head, token, 0))
    moved = 2 * rows * (width // head_dim + 1)  # heads in and out, cosine and sine
    num_bytes = moved * length * padded_lanes(head_dim) * flat.dtype.itemsize
    turned = pl.pallas_call(
        kernel,
        grid=(rows, length // block, width // head_dim),
        in_specs=[
            heads,
            pl.BlockSpec((2, None, block, head_dim), lambda row, token, head: (0, row, token, 0)),
        ],
        out_specs=heads,
        out_shape=jax.ShapeDtypeStruct(given.shape, flat.dtype),
        cost_estimate=pl.CostEstimate(flops=5 * flat.size, transcendentals=0, bytes_accessed=num_bytes),
        interpret=target == "interpreted",
        name="turn_heads",
    )(given, rotation)
    return turned if call.is_flat else heads_last(turned)


def rotate(x: Any, cos: Any, sin: Any, *, backward: bool) -> Any:
    """Return x (T, D) rotated, or the gradient of x from that of the rotated, in float32; inside a kernel."""
    x, cos, sin = (tensor.astype(jnp.float32) for tensor in (x, cos, sin))
    if backward:
        return x * cos + _halves(x * sin, signs=(1.0, -1.0))
    return x * cos + _halves(x, signs=(-1.0, 1.0)) * sin


def _halves(x: Any, *, signs: Sequence[float]) -> Any:
    """Map (a, b) to (signs[0] b, signs[1] a), inside a kernel."""
    half = x.shape[-1] // 2
    if x.shape[-1] % LANES:
        return jnp.concatenate([signs[0] * x[:, half:], signs[1] * x[:, :half]], axis=-1)
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return pltpu.roll(x, half, x.ndim - 1) * jnp.where(lane < half, signs[0], signs[1])
