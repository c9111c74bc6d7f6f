"""Attention as Pallas kernels for the TPU, lowered to HLO without a TPU: jax alone.

A row that vector memory holds, up to 8,192 tokens, goes to our own kernels (whole_rows.py), a longer one to jax's
"splash" attention. Its kernels take grouped key/value heads as they are, skip the blocks that a causal mask or the
window leaves empty, and mask by segment. They are called by their inner functions, forward and backward apart:
differentiated through jax the backward pass would run the forward kernel once more.

Splash wants heads first, (H, T, D). A projection makes (T, H D), and the way between is a copy of everything: for
Mistral's queries a third of a projection's time (libtpu 0.0.21, v6e). A block of splash is one head of some tokens;
in (T, H D) that is a block too, so its kernels run unchanged when each block is taken from there. Legend: B rows,
H query heads, K key/value heads, T tokens, D head dimension."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec

from tpu_experiments.runtime.kernels import whole_rows
from tpu_experiments.runtime.kernels.attention import LANES, SUBLANES, AttentionCall, Direction, Target
from tpu_experiments.runtime.kernels.heads import heads_first, heads_last, rotated
from tpu_experiments.runtime.kernels.lowering import hlo_of, on_each_chip
from tpu_experiments.runtime.patches import TORCHTPU, installed, patched_attribute, require_versions

HEADS_OF: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "fwd": ((0, 1, 2), (0,)),
    "dkv": ((0, 1, 2, 7), (1, 2)),
    "dq": ((0, 1, 2, 7), (0,)),
}
"""Indices of each splash kernel's operands (q, k, v, gradient of the output) and results with a head dimension."""
SCRATCH = {"fwd": 3, "dkv": 3, "dq": 1}
"""Results of jax 0.7.1's kernels that come before those and are scratch memory; later ones declare it as that."""


def flat_call(pallas_call: Callable[..., Any], *, phase: str) -> Callable[..., Any]:
    """Wrap `pallas_call` for one splash kernel so that its blocks are read from and written to (T, H D).

    The operands and results that splash passes stay heads first: each transpose is next to its inverse, and XLA removes
    both.
    """
    operands, results = HEADS_OF[phase]

    def build(kernel: Any, *, grid_spec: Any, out_shape: Any, **settings: Any) -> Callable[..., Any]:
        in_specs, out_specs, shapes = list(grid_spec.in_specs), list(grid_spec.out_specs), list(out_shape)
        scratch = tuple(grid_spec.scratch_shapes)
        for place in operands:
            in_specs[place] = _flat_block(in_specs[place])
        offset = 0 if scratch else SCRATCH[phase]
        given = [offset + place for place in results]
        for place in given:
            out_specs[place] = _flat_block(out_specs[place])
            shapes[place] = jax.eval_shape(heads_last, shapes[place])
        first = grid_spec.num_scalar_prefetch
        flat_grid = pltpu.PrefetchScalarGridSpec(first, grid_spec.grid, in_specs, out_specs, scratch)
        run = pallas_call(kernel, grid_spec=flat_grid, out_shape=shapes, **settings)

        def call(*tensors: Any) -> list[Any]:
            flat = list(tensors)
            for place in operands:
                flat[first + place] = heads_last(flat[first + place])
            found = list(run(*flat))
            for place in given:
                found[place] = heads_first(found[place], head_dim=out_specs[place].block_shape[-1])
            return found

        return call

    return build


def with_sums_by_row(pallas_call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `pallas_call` for splash's forward kernel so that it writes log-sum-exps as (H, 8, T), not (H, T, 128).

    Splash repeats each over the 128 lanes and takes the first of them outside: of Qwen2.5 0.5B 59 MB a layer for 8,192
    tokens, 20 of the 855 ms of its step on v6e-1 (planned). Here a block is transposed when it is complete.
    """

    def build(kernel: Any, *, grid_spec: Any, out_shape: Any, **settings: Any) -> Callable[..., Any]:
        *out_specs, wide = grid_spec.out_specs
        *shapes, shape = out_shape
        _, tokens, lanes = wide.block_shape
        assert lanes == LANES, "the log-sum-exps are splash's last result, over all lanes"
        heads, length, _ = shape.shape
        first = grid_spec.num_scalar_prefetch
        place = first + len(grid_spec.in_specs) + len(out_specs)

        def index_map(*at: Any) -> tuple[Any, ...]:
            head, token, _ = wide.index_map(*at)
            return head, 0, token

        def by_row(*refs: Any) -> None:
            *given, repeated = refs
            row, given[place] = given[place], repeated
            kernel(*given)
            last = len(grid_spec.grid) - 1

            @pl.when(pl.program_id(last) == pl.num_programs(last) - 1)
            def _() -> None:
                row[...] = repeated[...].T[:SUBLANES]

        specs = [*out_specs, pl.BlockSpec((None, SUBLANES, tokens), index_map)]
        scratch = (*grid_spec.scratch_shapes, pltpu.VMEM((tokens, lanes), shape.dtype))
        grid = pltpu.PrefetchScalarGridSpec(first, grid_spec.grid, list(grid_spec.in_specs), specs, scratch)
        rows = jax.ShapeDtypeStruct((heads, SUBLANES, length), shape.dtype)
        run = pallas_call(by_row, grid_spec=grid, out_shape=[*shapes, rows], **settings)

        def call(*tensors: Any) -> list[Any]:
            *found, sums = run(*tensors)
            return [*found, sums[:, 0, :, None]]

        return call

    return build


def _flat_block(spec: Any) -> Any:
    """Convert a block spec: (..., None, n, D) at (..., h, i, 0) becomes (..., n, D) at (..., i, h)."""
    *outer, _, tokens, head_dim = spec.block_shape

    def index_map(*at: Any) -> tuple[Any, ...]:
        *before, head, token, _ = spec.index_map(*at)
        return *before, token, head

    return pl.BlockSpec((*outer, tokens, head_dim), index_map)


if installed("torch_tpu") is None:
    require_versions("jax")
    jax.config.update("jax_platforms", "cpu")  # jax only lowers here, and a TPU of this process belongs to torch_xla
else:
    require_versions("jax", of=TORCHTPU, lock="requirements-torchtpu.lock")
NO_SEGMENT = -1
"""Segment of tokens that are appended for the kernel's blocks: no token of the row attends to them, padding neither."""
SHARED_SETTINGS = ("mask_value", "is_mqa", "attn_logits_soft_cap", "mask_function", "interpret")


def lowered(call: AttentionCall, *, direction: Direction, target: Target) -> bytes:
    """Return the serialised HloModuleProto of the forward or backward pass.

    Forward is (q, k, v, segments, rotation) -> (out, log-sum-exp); backward is (q, k, v, segments, rotation, out,
    log-sum-exp, layer, grad of out) -> (dq, dk, dv). q, out (B, T, H D); k, v (B, T, K D); segments (B, T) int32;
    rotation (2, B, T, D), left out without rope; log-sum-exp (B, H, T) float32. With `call.layers` q, k and v have a
    leading dimension of layers, and `layer` is the number of one, int32 (); without, it is left out.
    """
    run = function_on_mesh(call, direction=direction, target=target)
    return hlo_of(run, arguments_of(call, direction=direction), target=target)


def function_on_mesh(call: AttentionCall, *, direction: Direction, target: Target) -> Callable[..., Any]:
    """Return the forward or backward pass of `lowered` as a function of jax, over the call's chips."""
    run = attention_function(call.of_one_chip, direction=direction, target=target)
    # Rows that do not divide are not sharded by the run either: then every chip computes all of them.
    by_rows = "fsdp" if call.rows % call.num_shards == 0 else None
    by_heads = "tensor" if call.head_shards > 1 else None
    features, sums = PartitionSpec(by_rows, None, by_heads), PartitionSpec(by_rows, by_heads)
    read = PartitionSpec(None, by_rows, None, by_heads) if call.layers else features
    specs = [read, read, read, PartitionSpec(by_rows)]
    specs += [PartitionSpec(None, by_rows)] if call.rotates else []
    specs += [features, sums] if direction == "backward" else []
    specs += [PartitionSpec()] if call.layers else []
    specs += [features] if direction == "backward" else []
    results = (features, sums) if direction == "forward" else (features, features, features)
    return on_each_chip(run, shards=call.num_shards, tensor=call.head_shards, given=tuple(specs), made=results)


def arguments_of(call: AttentionCall, *, direction: Direction) -> list[Any]:
    """Return the shapes of the arguments of the function that `lowered` lowers."""
    rows, length, size = call.rows, call.length, call.head_dim
    query = jax.ShapeDtypeStruct((rows, length, call.heads * size), call.dtype)
    key = jax.ShapeDtypeStruct((rows, length, call.kv_heads * size), call.dtype)
    stacks = (call.layers,) if call.layers else ()
    given = [jax.ShapeDtypeStruct((*stacks, *read.shape), call.dtype) for read in (query, key, key)]
    given.append(jax.ShapeDtypeStruct((rows, length), jnp.int32))
    if call.rotates:
        given.append(jax.ShapeDtypeStruct((2, rows, length, size), call.rotation_dtype or call.dtype))
    if direction == "backward":
        given += [query, jax.ShapeDtypeStruct((rows, call.heads, length), jnp.float32)]
        given += [jax.ShapeDtypeStruct((), jnp.int32)] if call.layers else []
        given.append(query)
    return given


def attention_function(call: AttentionCall, *, direction: Direction, target: Target) -> Callable[..., Any]:
    """Return the jax function that `lowered` lowers, for the rows and heads of one chip.

    With `target=interpreted` it runs the kernels on a CPU.
    """
    extra = call.padded_length - call.length
    run = _whole if call.is_whole else _by_blocks

    def padded(query: Any, key: Any, value: Any, segments: Any, *others: Any) -> Any:
        rotation = _padded(others[0], extra=extra, axis=2) if call.rotates else None
        tensors, layer = [query, key, value], [others[-2]] if call.layers else []
        if layer and not call.reads_by_number:
            number = layer.pop()
            tensors = [jax.lax.dynamic_index_in_dim(stack, number, keepdims=False) for stack in tensors]
        tensors = [_padded(tensor, extra=extra, axis=tensor.ndim - 2) for tensor in tensors]
        tensors.append(_padded(segments, extra=extra, axis=1, value=NO_SEGMENT))
        if direction == "backward":
            out, log_sum, *_, grad = others[1 if call.rotates else 0 :]
            tensors += [_padded(out, extra=extra, axis=1), _padded(log_sum, extra=extra, axis=2)]
            tensors += [*layer, _padded(grad, extra=extra, axis=1)]
        found = run(call, *tensors, rotation=rotation, direction=direction, target=target)
        if direction == "forward":
            return found[0][:, : call.length], found[1][..., : call.length]
        return tuple(grads[:, : call.length] for grads in found)

    return padded


def _whole(call: AttentionCall, *tensors: Any, rotation: Any, direction: Direction, target: Target) -> Any:
    """Run the kernels of rows that vector memory holds."""
    query, key, value, segments, *others = tensors
    if direction == "forward":
        return whole_rows.forward(call, target=target)(query, key, value, segments, rotation)
    out, log_sum, *layer, grad = others
    row_sums = jax.vmap(functools.partial(_row_sums, heads=call.heads))(out, grad)
    run = whole_rows.backward(call, target=target)
    return run(query, key, value, segments, rotation, log_sum, row_sums, grad, *layer)


def _by_blocks(call: AttentionCall, *tensors: Any, rotation: Any, direction: Direction, target: Target) -> Any:
    """Run splash's kernels, and rotate q, k and their gradients in kernels of their own."""

    def rotate(flat: Any, *, factor: float, backward: bool = False) -> Any:
        if rotation is None:
            return flat if factor == 1 else (flat.astype(jnp.float32) * factor).astype(flat.dtype)
        return rotated(flat, rotation, call=call, factor=factor, target=target, backward=backward)

    query, key, *others = tensors
    run = functools.partial(_forward if direction == "forward" else _backward, _kernel(call, target=target), call)
    with _patched_pallas_call(call):
        results = jax.vmap(run)(rotate(query, factor=call.scores.scale), rotate(key, factor=1.0), *others)
    if direction == "forward":
        return results
    dq, dk, dv = results
    return rotate(dq, factor=call.scores.scale, backward=True), rotate(dk, factor=1.0, backward=True), dv


def _padded(tensor: Any, *, extra: int, axis: int, value: int = 0) -> Any:
    """Append `extra` tokens."""
    width = [(0, extra if dim == axis else 0) for dim in range(tensor.ndim)]
    return jnp.pad(tensor, width, constant_values=value) if extra else tensor


def _kernel(call: AttentionCall, *, target: Target) -> Any:
    """Build jax's splash kernel with the mask and block sizes of the call; all heads share the mask."""
    shape = (call.padded_length, call.padded_length)
    if call.window is None:
        mask = masks.CausalMask(shape) if call.scores.causal else masks.FullMask(shape)
    else:  # a single mask is computed in the kernel; an intersection of two would be read from memory
        before, after = call.window - 1, 0 if call.scores.causal else call.window - 1
        mask = masks.LocalMask(shape, window_size=(before, after), offset=0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes = kernels.BlockSizes(**{f"block_{name}": call.block for name in names})
    return kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * call.heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=call.scores.soft_cap,
        interpret=target == "interpreted",
    )


def _forward(kernel: Any, call: AttentionCall, *tensors: Any) -> tuple[Any, Any]:
    """Return output (T, H D) and log-sum-exp (H, T) of one row."""
    *qkv, segments = tensors
    settings = dict(kernel.kwargs, save_residuals=True)
    query, key, value = (heads_first(tensor, head_dim=call.head_dim) for tensor in qkv)
    ids = kernels.SegmentIds(segments, segments)
    out, (log_sum,) = kernels._splash_attention_forward(kernel.fwd_mask_info, query, key, value, ids, None, **settings)
    return heads_last(out), log_sum


def _backward(kernel: Any, call: AttentionCall, *tensors: Any) -> tuple[Any, Any, Any]:
    """Return the gradients of the scaled query (T, H D), the key and the value (T, K D) of one row.

    dQ has a kernel of its own. The one for all gradients writes a dQ for each block of keys, summed outside: by libtpu
    0.0.21's estimates, with kernels at 40 % of the peak, 4 rows of 2,048 tokens with 32 heads of 128 take 4.4 ms so on
    v6e against 2.6 (v5e: 9.1 against 10.5), and those copies grow with the square of the length.
    """
    *qkv, segments, out, log_sum, grad = tensors
    query, key, value, do = (heads_first(tensor, head_dim=call.head_dim) for tensor in (*qkv, grad))
    settings = {name: kernel.kwargs[name] for name in SHARED_SETTINGS}
    sizes = kernel.kwargs["block_sizes"]
    layouts = {name: getattr(sizes, name) for name in ("q_layout", "k_layout", "v_layout")}
    ids = kernels.SegmentIds(segments, segments)
    given = (query, key, value, ids, None, log_sum, do, _row_sums(out, grad, heads=call.heads))
    block = {"bq": call.block, "bkv": call.block}
    _, dk, dv = kernels._splash_attention_bwd_dkv(
        *given,
        **block,
        bkv_compute=call.block,
        mask_info=kernel.dkv_mask_info,
        use_fused_bwd_kernel=False,
        **settings,
        **layouts,
    )
    dq = kernels._splash_attention_bwd_dq(*given, **block, mask_info=kernel.dq_mask_info, **settings, **layouts)
    return heads_last(dq), heads_last(dk), heads_last(dv)


def _row_sums(out: Any, grad: Any, *, heads: int) -> Any:
    """Return the sum of out x grad over each head's features, (H, T) float32.

    It is D of FlashAttention-2 (arXiv 2307.08691), computed as a matmul with ones in float32: a sum over part of a
    row's lanes would need another layout of the tensor.
    """
    product = out.astype(jnp.float32) * grad.astype(jnp.float32)
    ones = jnp.repeat(jnp.eye(heads), out.shape[1] // heads, axis=0)
    return jnp.matmul(product, ones, precision="highest").T


@contextmanager
def _patched_pallas_call(call: AttentionCall) -> Iterator[None]:
    """Patch splash's `pallas_call` inside: flat blocks where `call.is_flat`, and a cost estimate.

    Splash gives no estimate, and the compiler cannot see into a kernel.
    """
    real = kernels.pl

    def pallas_call(*args: Any, name: str, **settings: Any) -> Any:
        phase: Any = name.split("_")[2]  # splash_mha_fwd_segmented_...
        cost = real.CostEstimate(
            flops=call.flops(phase), transcendentals=call.exponentials(phase), bytes_accessed=call.bytes_moved(phase)
        )
        build = with_sums_by_row(real.pallas_call) if phase == "fwd" else real.pallas_call
        build = flat_call(build, phase=phase) if call.is_flat else build
        return build(*args, name=name, cost_estimate=cost, **settings)

    with patched_attribute(kernels, "pl", SimpleNamespace(**vars(real) | {"pallas_call": pallas_call})):
        yield
