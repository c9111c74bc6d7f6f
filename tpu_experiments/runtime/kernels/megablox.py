"""Grouped products as jax's Megablox kernels (arXiv 2211.15841), lowered to HLO without a TPU: jax alone.

The kernels go over tiles of sorted rows; a tile in which a group ends is computed once for each group in it. Legend as
in grouped.py.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.sharding import PartitionSpec

from tpu_experiments.runtime.kernels.attention import LANES
from tpu_experiments.runtime.kernels.grouped import GroupedProducts
from tpu_experiments.runtime.kernels.lowering import hlo_of, on_each_chip
from tpu_experiments.runtime.patches import require_versions

require_versions("jax")
jax.config.update("jax_platforms", "cpu")  # jax only lowers here, and a TPU of this process belongs to torch_xla
TILE_ROWS, TILE_INPUTS, TILE_OUTPUTS = 512, 1024, 768
"""Largest tile of a product of bfloat16: with both operands, result and sums 9 MiB of the 16 MiB of a v5e's kernel."""
SPLIT, WHOLE = PartitionSpec("fsdp"), PartitionSpec()


def order(products: GroupedProducts, *, experts: int) -> Callable[..., Any]:
    """Return the function of jax of `grouped.expert_order`."""

    def run(chosen: Any) -> Any:
        flat = chosen.reshape(-1).astype(jnp.int32)
        found = jnp.argsort(flat, stable=True).astype(jnp.int32)
        sizes = (flat[:, None] == jnp.arange(experts)[None]).sum(0, dtype=jnp.int32)
        return found, jnp.argsort(found).astype(jnp.int32), sizes[None]

    return _on_each_chip(run, products, given=(SPLIT,), made=(SPLIT, SPLIT, SPLIT))


def rows(products: GroupedProducts) -> Callable[..., Any]:
    """Return the function of jax of `grouped.rows_at`."""

    def run(x: Any, index: Any) -> Any:
        return x.at[index].get(mode="promise_in_bounds")

    return _on_each_chip(run, products, given=(SPLIT, SPLIT), made=SPLIT)


def product(products: GroupedProducts, *, contracted: int) -> Callable[..., Any]:
    """Return the function of jax of `grouped.grouped_product`."""

    def run(x: Any, weight: Any, sizes: Any) -> Any:
        return gmm(
            x,
            weight,
            sizes[0],
            preferred_element_type=x.dtype,
            tiling=tiling(len(x), weight.shape[contracted], weight.shape[3 - contracted], is_wide=x.dtype.itemsize > 2),
            transpose_rhs=contracted == 2,
            interpret=products.target == "interpreted",
        )

    return _on_each_chip(run, products, given=(SPLIT, WHOLE, SPLIT), made=SPLIT)


def outer(products: GroupedProducts, *, experts: int, dtype: str) -> Callable[..., Any]:
    """Return the function of jax of `grouped.grouped_outer`; where experts divide, each chip keeps the sum of its."""
    parts = products.mesh.num_shards
    is_split = experts % parts == 0

    def run(a: Any, b: Any, sizes: Any) -> Any:
        summed = tgmm(
            a.T,
            b,
            sizes[0],
            preferred_element_type=jnp.dtype(dtype),
            tiling=tiling(len(a), a.shape[1], b.shape[1], is_wide=True),
            interpret=products.target == "interpreted",
        )
        if parts == 1:
            return summed
        return jax.lax.psum_scatter(summed, "fsdp", tiled=True) if is_split else jax.lax.psum(summed, "fsdp")

    return _on_each_chip(run, products, given=(SPLIT, SPLIT, SPLIT), made=SPLIT if is_split else WHOLE)


def tiling(num_rows: int, inputs: int, outputs: int, *, is_wide: bool) -> tuple[int, int, int]:
    """Return the tile of a product: rows, inputs, outputs; a smaller one where the results have 4 bytes."""
    rows_of_tile = TILE_ROWS
    while num_rows % rows_of_tile:
        rows_of_tile //= 2
    limits = (TILE_INPUTS // 2, TILE_OUTPUTS // 2) if is_wide else (TILE_INPUTS, TILE_OUTPUTS)
    return rows_of_tile, _tile_of(inputs, limits[0]), _tile_of(outputs, limits[1])


def _tile_of(size: int, limit: int) -> int:
    """Return the largest multiple of the lanes up to a limit that divides a size; else the size or the limit."""
    if size <= limit:
        return size
    return next((tile for tile in range(limit, limit // 2 - 1, -LANES) if size % tile == 0), limit)


def _on_each_chip(run: Callable[..., Any], products: GroupedProducts, *, given: Any, made: Any) -> Callable[..., Any]:
    """Wrap `run` in a shard_map over rows: XLA would sort all chips' rows."""
    return on_each_chip(run, shards=products.mesh.num_shards, tensor=products.mesh.tensor, given=given, made=made)


@functools.cache
def lowered(
    name: str,
    products: GroupedProducts,
    settings: tuple[tuple[str, Any], ...],
    shapes: Sequence[tuple[tuple[int, ...], str]],
) -> bytes:
    """Return the serialised HloModuleProto of the function of this name for arguments of these shapes and types."""
    made: dict[str, Callable[..., Any]] = {"order": order, "rows": rows, "product": product, "outer": outer}
    run = made[name](products, **dict(settings))
    arguments = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]
    return hlo_of(run, arguments, target=products.target)
