"""Attention as jax's Pallas kernels for the TPU ("splash" attention), lowered to HLO without a TPU: jax alone.

The kernels take grouped key/value heads as they are, skip the blocks that the causal mask or the window leaves empty,
and mask by segment. They are called by their inner functions, forward and backward apart: differentiated through jax
the backward pass would run the forward kernel once more. Legend: B rows, H query heads, K key/value heads, T tokens,
D head dimension.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import AbstractMesh, PartitionSpec

from tpu_experiments.runtime.attention_call import AttentionCall, Direction, Target
from tpu_experiments.runtime.patches import mosaic_for_libtpu, replaced, require_versions
from tpu_experiments.runtime.splash_flat import flat_call, heads_beside, heads_first, turned

require_versions("jax")
jax.config.update("jax_platforms", "cpu")  # jax computes nothing here, and a TPU in this process is torch_xla's
SHARED_SETTINGS = ("mask_value", "is_mqa", "attn_logits_soft_cap", "mask_function", "interpret")


def lowered(call: AttentionCall, *, direction: Direction, target: Target) -> bytes:
    """Serialised HloModuleProto of forward (q, k, v, segments, rotation) -> (out, log-sum-exp) or backward
    (q, k, v, segments, rotation, out, log-sum-exp, grad of out) -> (dq, dk, dv).

    q, out (B, T, H D); k, v (B, T, K D); segments (B, T) int32; rotation (2, B, T, D), left out where nothing is
    turned; log-sum-exp (B, H, T) float32.
    """
    jax.config.update("jax_use_shardy_partitioner", False)  # torch_xla's programs are partitioned by GSPMD
    run = attention_function(call.of_one_chip, direction=direction, target=target)
    if call.num_shards * call.head_shards > 1:
        run = _of_each_chip(run, call, direction=direction)
    with mosaic_for_libtpu():
        traced = jax.jit(run, keep_unused=True).trace(*_arguments(call, direction=direction))
        module = traced.lower(lowering_platforms=("tpu" if target == "tpu" else "cpu",)).compiler_ir("hlo")
    return bytes(module.as_serialized_hlo_module_proto())


def _of_each_chip(run: Callable[..., Any], call: AttentionCall, *, direction: Direction) -> Callable[..., Any]:
    """`run` on every chip's rows and heads; XLA's partitioner cannot split a kernel."""
    # Rows that do not divide are not split by the run either: then every chip computes all of them.
    by_rows = "fsdp" if call.rows % call.num_shards == 0 else None
    by_heads = "tensor" if call.head_shards > 1 else None
    sizes = (call.num_shards, call.head_shards) if by_heads else (call.num_shards,)
    mesh = AbstractMesh(sizes, ("fsdp", "tensor")[: len(sizes)])
    features, sums = PartitionSpec(by_rows, None, by_heads), PartitionSpec(by_rows, by_heads)
    specs = [features, features, features, PartitionSpec(by_rows)]
    specs += [PartitionSpec(None, by_rows)] if call.rotates else []
    specs += [features, sums, features] if direction == "backward" else []
    results = (features, sums) if direction == "forward" else (features, features, features)
    return jax.shard_map(run, mesh=mesh, in_specs=tuple(specs), out_specs=results, check_vma=False)


def _arguments(call: AttentionCall, *, direction: Direction) -> list[Any]:
    """Shapes of what `lowered` takes."""
    rows, length, size = call.rows, call.length, call.head_dim
    query = jax.ShapeDtypeStruct((rows, length, call.heads * size), call.dtype)
    key = jax.ShapeDtypeStruct((rows, length, call.kv_heads * size), call.dtype)
    given = [query, key, key, jax.ShapeDtypeStruct((rows, length), jnp.int32)]
    if call.rotates:
        given.append(jax.ShapeDtypeStruct((2, rows, length, size), call.dtype))
    if direction == "backward":
        given += [query, jax.ShapeDtypeStruct((rows, call.heads, length), jnp.float32), query]
    return given


def attention_function(call: AttentionCall, *, direction: Direction, target: Target) -> Callable[..., Any]:
    """The jax function behind `lowered`, for the rows of one chip; `interpreted` runs the kernels on a CPU."""
    extra = call.padded_length - call.length
    per_row = _forward if direction == "forward" else _backward

    def turn(flat: Any, rotation: Any, *, factor: float, backward: bool = False) -> Any:
        if rotation is None:
            return flat if factor == 1 else (flat.astype(jnp.float32) * factor).astype(flat.dtype)
        return turned(flat, rotation, call=call, factor=factor, target=target, backward=backward)

    def run(query: Any, key: Any, value: Any, segments: Any, *others: Any) -> Any:
        rotation = _padded(others[0], extra=extra, axis=2) if call.rotates else None
        flat = [_padded(tensor, extra=extra, axis=1) for tensor in (query, key, value)]
        scaled, key = turn(flat[0], rotation, factor=call.scores.scale), turn(flat[1], rotation, factor=1.0)
        tensors = [scaled, key, flat[2], _padded(segments, extra=extra, axis=1)]
        if direction == "backward":
            out, log_sum, grad = others[-3:]
            tensors += [_padded(out, extra=extra, axis=1), _padded(log_sum, extra=extra, axis=2)]
            tensors.append(_padded(grad, extra=extra, axis=1))
        with _as_wanted(call):
            results = jax.vmap(functools.partial(per_row, _kernel(call, target=target), call))(*tensors)
        if direction == "forward":
            return results[0][:, : call.length], results[1][..., : call.length]
        dq = turn(results[0], rotation, factor=call.scores.scale, backward=True)
        dk = turn(results[1], rotation, factor=1.0, backward=True)
        return tuple(grads[:, : call.length] for grads in (dq, dk, results[2]))

    return run


def _padded(tensor: Any, *, extra: int, axis: int) -> Any:
    """More tokens at the end: of segment 0, as all padding, and seen by no token before them."""
    width = [(0, extra if dim == axis else 0) for dim in range(tensor.ndim)]
    return jnp.pad(tensor, width) if extra else tensor


def _kernel(call: AttentionCall, *, target: Target) -> Any:
    """Mask and block sizes as jax's kernels want them; all heads share the mask."""
    shape = (call.padded_length, call.padded_length)
    if call.window is None:
        mask = masks.CausalMask(shape)
    else:  # one mask that the kernel computes; an intersection of two would be read from memory
        mask = masks.LocalMask(shape, window_size=(call.window - 1, 0), offset=0)
    names = ["q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute"]
    names += ["q_dq", "kv_dq"] if call.backward == "split" else []
    blocks = {f"block_{name}": call.block for name in names}
    sizes = kernels.BlockSizes(**blocks, use_fused_bwd_kernel=call.backward == "fused")
    return kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * call.heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=call.scores.soft_cap,
        interpret=target == "interpreted",
    )


def _forward(kernel: Any, call: AttentionCall, *tensors: Any) -> tuple[Any, Any]:
    """One row, (T, H D) and so on: output (T, H D) and log-sum-exp (H, T)."""
    *qkv, segments = tensors
    settings = dict(kernel.kwargs, save_residuals=True)
    query, key, value = (heads_first(tensor, head_dim=call.head_dim) for tensor in qkv)
    ids = kernels.SegmentIds(segments, segments)
    out, (log_sum,) = kernels._splash_attention_forward(kernel.fwd_mask_info, query, key, value, ids, None, **settings)
    return heads_beside(out), log_sum


def _backward(kernel: Any, call: AttentionCall, *tensors: Any) -> tuple[Any, Any, Any]:
    """One row: gradients of the scaled query (T, H D), the key and the value (T, K D)."""
    *qkv, segments, out, log_sum, grad = tensors
    query, key, value, do = (heads_first(tensor, head_dim=call.head_dim) for tensor in (*qkv, grad))
    settings = {name: kernel.kwargs[name] for name in SHARED_SETTINGS}
    sizes = kernel.kwargs["block_sizes"]
    layouts = {name: getattr(sizes, name) for name in ("q_layout", "k_layout", "v_layout")}
    ids = kernels.SegmentIds(segments, segments)
    given = (query, key, value, ids, None, log_sum, do, _row_sums(out, grad, heads=call.heads))
    fused = call.backward == "fused"
    block = {"bq": call.block, "bkv": call.block}
    dq, dk, dv = kernels._splash_attention_bwd_dkv(
        *given,
        **block,
        bkv_compute=call.block,
        mask_info=kernel.dkv_mask_info,
        use_fused_bwd_kernel=fused,
        **settings,
        **layouts,
    )
    if not fused:
        dq = kernels._splash_attention_bwd_dq(*given, **block, mask_info=kernel.dq_mask_info, **settings, **layouts)
    return heads_beside(dq), heads_beside(dk), heads_beside(dv)


def _row_sums(out: Any, grad: Any, *, heads: int) -> Any:
    """Sum of out x grad over each head's features, (H, T) float32 (D of FlashAttention-2, arXiv 2307.08691).

    As a product with ones in float32: a sum over part of a row's lanes would want another order of the tensor.
    """
    product = out.astype(jnp.float32) * grad.astype(jnp.float32)
    ones = jnp.repeat(jnp.eye(heads), out.shape[1] // heads, axis=0)
    return jnp.matmul(product, ones, precision="highest").T


@contextmanager
def _as_wanted(call: AttentionCall) -> Iterator[None]:
    """Kernels built inside take heads out of (T, H D) where they can, and say how much they work: splash says nothing,
    and the compiler cannot see into a kernel."""
    real = kernels.pl

    def pallas_call(*args: Any, name: str, **settings: Any) -> Any:
        phase: Any = name.split("_")[2]  # splash_mha_fwd_segmented_...
        cost = real.CostEstimate(
            flops=call.flops(phase), transcendentals=call.exponentials, bytes_accessed=call.bytes_moved(phase)
        )
        build = flat_call(real.pallas_call, phase=phase) if call.is_flat else real.pallas_call
        return build(*args, name=name, cost_estimate=cost, **settings)

    with replaced(kernels, "pl", SimpleNamespace(**vars(real) | {"pallas_call": pallas_call})):
        yield
