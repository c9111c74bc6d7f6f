"""jax's splash kernels on tensors of the flat layout (T, H D), and rope on heads in that layout.

Splash takes heads first, (H, T, D). A projection makes (T, H D), and the transpose copies the whole tensor: for
Mistral's queries it takes a third of a projection's time (libtpu 0.0.21, v6e). A block of splash is one head of some
tokens, which is a block of (T, H D) too, so its kernels run unchanged with other block specs. Legend as in splash.py.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_experiments.runtime.attention_call import AttentionCall, Target

HEADS_OF: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "fwd": ((0, 1, 2), (3,)),
    "dkv": ((0, 1, 2, 7), (3, 4, 5)),
    "dq": ((0, 1, 2, 7), (1,)),
}
"""Indices of each splash kernel's operands (q, k, v, gradient of the output) and results with a head dimension."""


def heads_first(flat: Any, *, head_dim: int) -> Any:
    """Transpose (..., T, N D) to (..., N, T, D)."""
    return jnp.swapaxes(flat.reshape(*flat.shape[:-1], -1, head_dim), -2, -3)


def heads_beside(tensor: Any) -> Any:
    """Transpose (..., N, T, D) to (..., T, N D), the inverse of `heads_first`."""
    return jnp.swapaxes(tensor, -2, -3).reshape(*tensor.shape[:-3], tensor.shape[-2], -1)


def flat_call(pallas_call: Callable[..., Any], *, phase: str) -> Callable[..., Any]:
    """Wrap `pallas_call` for one splash kernel so that its blocks are read from and written to (T, H D).

    The operands and results that splash passes stay heads first: each transpose is next to its inverse, and XLA removes
    both.
    """
    operands, results = HEADS_OF[phase]

    def build(kernel: Any, *, grid_spec: Any, out_shape: Any, **settings: Any) -> Callable[..., Any]:
        in_specs, out_specs, shapes = list(grid_spec.in_specs), list(grid_spec.out_specs), list(out_shape)
        for place in operands:
            in_specs[place] = _flat_block(in_specs[place])
        given = [place for place in results if shapes[place] is not None]
        for place in given:
            out_specs[place] = _flat_block(out_specs[place])
            shapes[place] = jax.eval_shape(heads_beside, shapes[place])
        first = grid_spec.num_scalar_prefetch
        flat_grid = pltpu.PrefetchScalarGridSpec(first, grid_spec.grid, in_specs, out_specs)
        run = pallas_call(kernel, grid_spec=flat_grid, out_shape=shapes, **settings)

        def call(*tensors: Any) -> list[Any]:
            flat = list(tensors)
            for place in operands:
                flat[first + place] = heads_beside(flat[first + place])
            found = list(run(*flat))
            for place in given:
                head_dim = out_specs[place].block_shape[-1]
                found[place] = heads_first(found[place], head_dim=head_dim)
            return found

        return call

    return build


def _flat_block(spec: Any) -> Any:
    """Convert a block spec: (..., None, n, D) at (..., h, i, 0) becomes (..., n, D) at (..., i, h)."""
    *outer, _, tokens, head_dim = spec.block_shape

    def index_map(*at: Any) -> tuple[Any, ...]:
        *before, head, token, _ = spec.index_map(*at)
        return *before, token, head

    return pl.BlockSpec((*outer, tokens, head_dim), index_map)


def turned(
    flat: Any, rotation: Any, *, call: AttentionCall, factor: float, target: Target, backward: bool = False
) -> Any:
    """Apply rope to every head of (B, T, N D) and multiply by `factor`; computed in float32.

    The formula is that of transformers' `apply_rotary_pos_emb`: x cos + rotate_half(x) sin, with
    rotate_half (a, b) = (-b, a).

    Args:
        rotation: cosine and sine, (2, B, T, D).
        backward: compute the gradient of x from the gradient of the output instead.
    """
    if not call.is_flat:
        turn = functools.partial(_turn, backward=backward, halves=_halves_by_product)
        heads = heads_first(flat, head_dim=call.head_dim)
        cos, sin = rotation[:, :, None]
        return heads_beside((turn(heads, cos, sin) * factor).astype(flat.dtype))

    def kernel(x_ref: Any, rotation_ref: Any, out_ref: Any) -> None:
        turn = _turn(x_ref[...], rotation_ref[0], rotation_ref[1], backward=backward, halves=_halves_by_roll)
        out_ref[...] = (turn * factor).astype(out_ref.dtype)

    rows, length, width = flat.shape
    block, head_dim = call.block, call.head_dim
    num_bytes = 2 * flat.size * flat.dtype.itemsize + rotation.size * rotation.dtype.itemsize
    return pl.pallas_call(
        kernel,
        grid=(rows, length // block, width // head_dim),
        in_specs=[
            pl.BlockSpec((None, block, head_dim), lambda row, token, head: (row, token, head)),
            pl.BlockSpec((2, None, block, head_dim), lambda row, token, head: (0, row, token, 0)),
        ],
        out_specs=pl.BlockSpec((None, block, head_dim), lambda row, token, head: (row, token, head)),
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        cost_estimate=pl.CostEstimate(flops=5 * flat.size, transcendentals=0, bytes_accessed=num_bytes),
        interpret=target == "interpreted",
        name="turn_heads",
    )(flat, rotation)


def _turn(x: Any, cos: Any, sin: Any, *, backward: bool, halves: Callable[..., Any]) -> Any:
    x, cos, sin = (tensor.astype(jnp.float32) for tensor in (x, cos, sin))
    if backward:
        return x * cos + halves(x * sin, signs=(1.0, -1.0))
    return x * cos + halves(x, signs=(-1.0, 1.0)) * sin


def _halves_by_roll(x: Any, *, signs: Sequence[float]) -> Any:
    """Map (a, b) to (signs[0] b, signs[1] a), inside a kernel."""
    half = x.shape[-1] // 2
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return pltpu.roll(x, half, x.ndim - 1) * jnp.where(lane < half, signs[0], signs[1])


def _halves_by_product(x: Any, *, signs: Sequence[float]) -> Any:
    """Map (a, b) to (signs[0] b, signs[1] a) outside a kernel, by an exact matmul with 0, 1 and -1.

    Slices of half a tile would be copied instead.
    """
    half = x.shape[-1] // 2
    eye, none = jnp.eye(half), jnp.zeros((half, half))
    matrix = jnp.block([[none, signs[1] * eye], [signs[0] * eye, none]])
    return jnp.matmul(x, matrix, precision="highest")
