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
from jax._src import tpu_custom_call
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import AbstractMesh, PartitionSpec

from tpu_experiments.runtime.attention_call import AttentionCall, Direction, Target

jax.config.update("jax_platforms", "cpu")  # jax computes nothing here, and a TPU in this process is torch_xla's
MOSAIC_VERSION = 7
"""libtpu 0.0.21 reads Mosaic up to 7, jax 0.7.1 writes 8 where no TPU tells it otherwise."""
AXIS = "fsdp"


def lowered(call: AttentionCall, *, direction: Direction, target: Target) -> bytes:
    """Serialised HloModuleProto of forward (q, k, v, segments) -> (out, log-sum-exp) or backward
    (q, k, v, segments, out, log-sum-exp, grad of out) -> (dq, dk, dv).

    q, out (B, H, T, D); k, v (B, K, T, D); segments (B, T) int32; log-sum-exp (B, H, T) float32.
    """
    tpu_custom_call.get_ir_version = lambda _: MOSAIC_VERSION
    jax.config.update("jax_use_shardy_partitioner", False)  # torch_xla's programs are partitioned by GSPMD
    run = attention_function(call, direction=direction, target=target)
    if call.num_shards > 1:
        # Rows that do not divide are not split by the run either: then every chip computes all of them.
        spec = PartitionSpec(AXIS) if call.rows % call.num_shards == 0 else PartitionSpec()
        mesh = AbstractMesh((call.num_shards,), (AXIS,))
        run = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    traced = jax.jit(run, keep_unused=True).trace(*_arguments(call, direction=direction))
    module = traced.lower(lowering_platforms=("tpu" if target == "tpu" else "cpu",)).compiler_ir("hlo")
    return bytes(module.as_serialized_hlo_module_proto())


def _arguments(call: AttentionCall, *, direction: Direction) -> list[Any]:
    """Shapes of what `lowered` takes."""
    rows, heads, length, size = call.rows, call.heads, call.length, call.head_dim
    query = jax.ShapeDtypeStruct((rows, heads, length, size), call.dtype)
    key = jax.ShapeDtypeStruct((rows, call.kv_heads, length, size), call.dtype)
    given = [query, key, key, jax.ShapeDtypeStruct((rows, length), jnp.int32)]
    if direction == "backward":
        given += [query, jax.ShapeDtypeStruct((rows, heads, length), jnp.float32), query]
    return given


def attention_function(call: AttentionCall, *, direction: Direction, target: Target) -> Callable[..., Any]:
    """The jax function behind `lowered`, for the rows of one chip; `interpreted` runs the kernels on a CPU."""
    per_row = _forward if direction == "forward" else _backward

    def run(query: Any, key: Any, value: Any, segments: Any, *saved: Any) -> Any:
        kernel = _kernel(call, target=target)
        extra = call.padded_length - call.length
        scaled = (query.astype(jnp.float32) * call.scores.scale).astype(query.dtype)
        tensors = [_padded(tensor, extra=extra, axis=2) for tensor in (scaled, key, value)]
        tensors += [_padded(segments, extra=extra, axis=1), *(_padded(tensor, extra=extra, axis=2) for tensor in saved)]
        with _stating_cost(call):
            results = jax.vmap(functools.partial(per_row, kernel))(*tensors)
        first, *others = (result[:, :, : call.length] for result in results)
        if direction == "backward":
            first = (first.astype(jnp.float32) * call.scores.scale).astype(first.dtype)
        return first, *others

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


def _forward(kernel: Any, query: Any, key: Any, value: Any, segments: Any) -> Any:
    """One row: output (H, T, D) and log-sum-exp (H, T)."""
    settings = dict(kernel.kwargs, save_residuals=True)
    ids = kernels.SegmentIds(segments, segments)
    out, (log_sum,) = kernels._splash_attention_forward(kernel.fwd_mask_info, query, key, value, ids, None, **settings)
    return out, log_sum


def _backward(
    kernel: Any, query: Any, key: Any, value: Any, segments: Any, out: Any, log_sum: Any, grad: Any
) -> tuple[Any, Any, Any]:
    """One row: gradients of the scaled query (H, T, D), the key and the value (K, T, D)."""
    ids = kernels.SegmentIds(segments, segments)
    saved = (query, key, value, ids, None, out, log_sum, kernel.dq_mask_info, kernel.dkv_mask_info)
    grads = kernels._splash_attention_bwd(**kernel.kwargs, res=saved, do=grad)
    return grads[3], grads[4], grads[5]


@contextmanager
def _stating_cost(call: AttentionCall) -> Iterator[None]:
    """Kernels built inside say how much they work: splash says nothing, and the compiler cannot see into a kernel."""
    real = kernels.pl

    def pallas_call(*args: Any, name: str, **settings: Any) -> Any:
        phase: Any = name.split("_")[2]  # splash_mha_fwd_segmented_...
        cost = real.CostEstimate(
            flops=call.flops(phase), transcendentals=call.exponentials, bytes_accessed=call.bytes_moved(phase)
        )
        return real.pallas_call(*args, name=name, cost_estimate=cost, **settings)

    kernels.pl = SimpleNamespace(**vars(real) | {"pallas_call": pallas_call})
    try:
        yield
    finally:
        kernels.pl = real
